"""What users named is printed as they named it."""

import ast
import io
from pathlib import Path

import pytest

import surefoot
from surefoot.core.console import progress_bar, result_console, takes_colour, wrapped_for

FILES = [path for path in sorted(Path(surefoot.__file__).parent.rglob("*.py")) if "zoo" not in path.parts]


def test_where_there_is_no_terminal_lines_are_not_broken_at_80_columns(capsys):
    result_console().print("x" * 150)
    assert capsys.readouterr().out == "x" * 150 + "\n"


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("stream", "variables", "takes"),
    [
        (Terminal(), {}, True),
        (Terminal(), {"NO_COLOR": "1"}, False),
        (Terminal(), {"TERM": "dumb"}, False),
        (io.StringIO(), {}, False),
        (None, {}, False),
    ],
)
def test_colours_are_for_terminals_that_have_them_and_users_who_want_them(monkeypatch, stream, variables, takes):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert takes_colour(stream) is takes


def test_a_name_between_colons_is_no_emoji(capsys):
    from rich.table import Table

    console = result_console()
    console.print("digits:100: no loss", markup=False)
    console.print("digits:100: [bold]no[/bold] loss")
    console.print(Table("digits:100:", box=None, pad_edge=False))
    assert capsys.readouterr().out.split("\n") == ["digits:100: no loss"] * 2 + ["digits:100:", ""]


def test_a_progress_bar_shows_its_description_as_it_is():
    bar = progress_bar()
    bar.console.file = io.StringIO()
    bar.console.width = 100
    bar.add_task("net[0]:100: [bold]", total=2)
    bar.console.print(bar.get_renderable())
    assert bar.console.file.getvalue().startswith("net[0]:100: [bold] ")


def made_with_emoji(source):
    """The lines that make a console, or a text with markup, without turning emoji off."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).rpartition(".")[2] in ("Console", "from_markup", "render_markup")
        and "emoji=False" not in map(ast.unparse, node.keywords)
    ]


def test_no_console_of_the_package_has_emoji_on():
    assert {str(path): lines for path in FILES if (lines := made_with_emoji(path.read_text()))} == {}


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("Console()", [1]),
        ("rich.console.Console(width=3)", [1]),
        ("Console(emoji=False)", []),
        ("Console(emoji=1)", [1]),
    ],
)
def test_a_console_with_emoji_would_be_found(source, lines):
    assert made_with_emoji(source) == lines


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_message_is_wrapped_between_words_in_a_terminal_only(monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    words = "surefoot: there is no such folder /a/path/that/is/longer/than/a/line as this."
    lines = wrapped_for(Terminal(), words).splitlines()
    assert " ".join(lines) == words
    assert max(len(line) for line in lines if "/" not in line) <= 30
    assert wrapped_for(io.StringIO(), words) == words
    assert wrapped_for(None, words) == words


def test_lines_are_wrapped_one_by_one_with_their_indentation(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("COLUMNS", "20")
    text = "a title\n\n  some words that are longer than a line"
    assert wrapped_for(Terminal(), text) == "a title\n\n  some words that\n  are longer than a\n  line"
