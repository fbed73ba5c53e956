"""What all commands share: help, version, and wrong use in one line."""

import pytest

import surefoot
from surefoot.cli import app, main


def answer(capsys, *arguments):
    with pytest.raises(SystemExit) as ending:
        main(list(arguments))
    printed = capsys.readouterr()
    return ending.value.code, printed.out, printed.err


def test_the_version_is_printed(capsys):
    assert answer(capsys, "--version") == (0, f"surefoot {surefoot.__version__}\n", "")


@pytest.mark.parametrize("word", ["-h", "--help"])
def test_help_lists_every_command(capsys, word):
    code, out, _ = answer(capsys, word)
    names = {(entry.name or entry.callback.__name__) for entry in app.registered_commands}
    assert code == 0
    assert names == {
        *("run", "runs", "diagnose", "report", "watch", "serve"),
        *("doctor", "replay", "bisect", "explain", "demo"),
    }
    assert all(f"  {name} " in out for name in names | {"zoo"})


def test_no_command_is_the_help_and_exit_code_2(capsys):
    code, out, _ = answer(capsys)
    assert code == 2
    assert "Usage: surefoot" in out


@pytest.mark.parametrize("arguments", [["no-such-command"], ["serve", "--port", "x", "."], ["explain", "a", "b"]])
def test_wrong_use_is_one_line_on_stderr_that_names_the_help(capsys, arguments):
    code, out, error = answer(capsys, *arguments)
    (line,) = error.splitlines()
    assert (code, out) == (2, "")
    assert line.startswith("surefoot: ")
    assert "--help`" in line
