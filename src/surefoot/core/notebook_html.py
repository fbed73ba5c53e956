"""HTML for notebooks: headings, tables and lists that results return from `_repr_html_`.

All text is escaped, and styles are inline: the HTML needs no script, no style sheet and no network. It is readable on a
light and on a dark background. Each function returns one fragment, and `page` joins them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

_COLOURS = {
    "fail": "#c62828",
    "error": "#c62828",
    "broken": "#c62828",
    "warn": "#b26a00",
    "warning": "#b26a00",
    "unstable": "#b26a00",
    "pass": "#2e7d32",
    "healthy": "#2e7d32",
}
_OTHER_COLOUR = "#757575"
_CELL = "padding:2px 10px 2px 0;text-align:left;vertical-align:top;white-space:normal"


def page(*fragments: str) -> str:
    """The fragments in one element."""
    return f'<div style="font-family:sans-serif;font-size:13px;line-height:1.45">{"".join(fragments)}</div>'


def heading(status: str, text: str) -> str:
    """A status in its colour, and one line of text."""
    return f"<p><strong>{badge(status)}</strong> {escape(text)}</p>"


def badge(status: str) -> str:
    """A status such as `fail` or `healthy`, in its colour."""
    return f'<span style="color:{_COLOURS.get(status, _OTHER_COLOUR)};font-weight:bold">{escape(status)}</span>'


def text(words: str) -> str:
    """One paragraph."""
    return f"<p>{escape(words)}</p>"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of escaped text. A cell that is a known status is coloured."""
    head = "".join(f'<th style="{_CELL}">{escape(column)}</th>' for column in columns)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f'<table style="border-collapse:collapse"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _cell(value: str) -> str:
    shown = badge(value) if value in _COLOURS else escape(value)
    return f'<td style="{_CELL}">{shown}</td>'
