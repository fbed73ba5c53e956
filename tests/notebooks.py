"""Run the code cells of a notebook without Jupyter, and collect what it would display.

A cell runs as in a notebook: all cells share one namespace, and the value of a last expression is displayed, as HTML if
it has `_repr_html_`. `python tests/notebooks.py FILES` runs notebooks and writes the outputs into them.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any


def run(path: Path) -> list[list[dict[str, Any]]]:
    """The outputs of each code cell, as the notebook format has them. Raises what a cell raises."""
    names: dict[str, Any] = {"__name__": "__main__"}
    return [_outputs(cell, names) for cell in cells(path)]


def cells(path: Path) -> list[str]:
    """The source of each code cell."""
    return ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def _outputs(source: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    body = ast.parse(source)
    last = body.body.pop() if isinstance(body.body[-1], ast.Expr) else None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        exec(compile(body, "<cell>", "exec"), names)
        shown = None if last is None else eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        outputs.append(
            {"output_type": "stream", "name": "stdout", "text": printed.getvalue().splitlines(keepends=True)}
        )
    if shown is not None:
        # Not the plain text beside the HTML: of a loaded run it has the paths of the machine.
        has_html = hasattr(shown, "_repr_html_")
        data = (
            {"text/html": [shown._repr_html_()]} if has_html else {"text/plain": str(shown).splitlines(keepends=True)}
        )
        outputs.append({"output_type": "display_data", "data": data, "metadata": {}})
    return outputs


def write(path: Path) -> None:
    """Put the outputs of a run into the notebook."""
    notebook = json.loads(path.read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, (cell, outputs) in enumerate(zip(code, run(path), strict=True), 1):
        cell["execution_count"], cell["outputs"] = number, outputs
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    given = [Path(name).resolve() for name in sys.argv[1:]]
    os.chdir(tempfile.mkdtemp())
    for each in given:
        write(each)
