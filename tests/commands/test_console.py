from surefoot.commands.console import result_console


def test_where_there_is_no_terminal_lines_are_not_broken_at_80_columns(capsys):
    result_console().print("x" * 150)
    assert capsys.readouterr().out == "x" * 150 + "\n"
