"""The report page: one HTML file that needs nothing but a browser.

The page is a template, a style sheet, a chart library and a few scripts, which lie beside this file, put into one file
together with the run's data. The data is JSON in an element that no browser runs, and the page's policy names the hash
of its only script: whatever a layer or an exception is called, it stays text.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from surefoot.core.files import write_file
from surefoot.report.page.encode import embedded
from surefoot.report.page.payload import sections, stamp
from surefoot.report.page.source import read_source

if TYPE_CHECKING:
    from collections.abc import Mapping

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
    "findings.js",
    "events.js",
    "experiments.js",
    "runs.js",
    "page.js",
    "live.js",
)
"""In the order in which they follow each other inside one function, so that they share names and leak none."""


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
    # One pass: what is put in is not searched again, so data that looks like a place to fill stays data.
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], _asset("page.html"))


def policy(live: bool) -> str:
    """What the browser may do for this page: run this script, use this style, and when live ask its own server."""
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
