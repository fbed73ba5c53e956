"""Draws docs/demo.svg: the training loss of the demo's three runs, as `surefoot demo` has left them in its folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from surefoot.build.line_chart import Chart, ChartSeries, to_svg
from surefoot.demo.results import faults_of

SMOOTH = 3
LABELS = ("corrupt batch", "LR typo", "overflow", "NaN gradient")


def smoothed(values: list[float]) -> list[float]:
    windows = [values[max(0, i - SMOOTH + 1) : i + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def main(folder: Path) -> None:
    lines, steps = [], 0
    for name, label in [("bare", "bare"), ("guarded", "guarded"), ("clean", "no faults")]:
        losses = json.loads((folder / name / "results.json").read_text())["losses"]
        steps = len(losses)
        lines.append(ChartSeries(label, range(steps), smoothed(losses)))
    marks = tuple((fault.steps.start, label) for fault, label in zip(faults_of(steps), LABELS, strict=True))
    title = "A character transformer: the same faults, bare and guarded"
    chart = Chart(title, "step", "training loss", tuple(lines), log_y=True, marks=marks)
    Path(__file__).parents[1].joinpath("docs/demo.svg").write_text(to_svg(chart))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/demo"))
