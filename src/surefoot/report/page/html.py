"""The report page: one HTML file that needs only a browser.

A template, a style sheet, a chart library and a few scripts are combined into one file with the run's data. The data is
JSON in an element that browsers do not execute, and the content security policy contains the hash of the only script:
names of layers and exceptions are always treated as text.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path

from surefoot.core.files import write_file
from surefoot.report.page.encode import embedded
from surefoot.report.page.payload import sections, stamp
from surefoot.report.page.source import read_source

SCRIPTS = (
    "elements.js",
    "words.js",
    "theme.js",
    "view.js",
    "tooltip.js",
    "axes.js",
    "lines.js",
    "marks.js",
    "export.js",
    "heat.js",
    "maps.js",
    "histograms.js",
    "head.js",
    "source.js",
    "findings.js",
    "events.js",
    "experiments.js",
    "runs.js",
    "page.js",
    "live.js",
)
"""In the order in which they are concatenated inside one function, so that they share names and define no globals."""


def write_report(folder: str | Path, out: str | Path | None = None) -> Path:
    """Write the page of a run folder, `report.html` inside it or at `out`; returns its path."""
    source = read_source(folder)
    path = Path(out) if out is not None else Path(folder) / "report.html"
    text = page({"made": stamp(), **sections(source)})
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, text)
    return path


def page(data: Mapping[str, object], live: bool = False) -> str:
    """The text of the page."""
    style, script = _style(), _script()
    parts = {
        "policy": policy(live),
        "style": style,
        "script": script,
        "data": embedded({**data, "live": live}),
    }
    # One pass: inserted text is not searched again, so data that looks like a placeholder stays data.
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], _asset("page.html"))


def policy(live: bool) -> str:
    """The content security policy: run this script, use this style, and, if live, connect to the own server."""
    return "; ".join(
        [
            "default-src 'none'",
            f"script-src 'sha256-{_hash(_script())}'",
            f"style-src 'sha256-{_hash(_style())}'",
            "img-src data:",
            f"connect-src {chr(39)}{'self' if live else 'none'}{chr(39)}",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")


@cache
def _script() -> str:
    body = "\n".join(_asset(name) for name in SCRIPTS)
    return f'{_asset("uplot.js", "vendor")}\n(() => {{\n"use strict";\n{body}\n}})();\n'


@cache
def _style() -> str:
    return f"{_asset('uplot.css', 'vendor')}\n{_asset('page.css')}"


@cache
def _asset(name: str, folder: str = "assets") -> str:
    return (files("surefoot.report") / folder / name).read_text(encoding="utf-8")
