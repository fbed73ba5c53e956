"""The data of the page's line charts: loss, gradient norm, learning rate, loss scale, and the user's own signals.

A chart has a title and series; a series has a role, which determines how it is drawn, and two columns. A series whose
value never changes is shown as text instead of a chart.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from surefoot.report.page.columns import Numbers, by_part, kept_with, measured, smoothed, whole_numbers
from surefoot.report.page.encode import numbers

if TYPE_CHECKING:
    import pyarrow as pa

    from surefoot.report.page.sections import PageChart, PageSeries, Role

_CHARTS = {
    "loss": ("Loss", "Faint: every step. Line: median of recent steps."),
    "grad_norm": ("Gradient norm", ""),
    "lr": ("Learning rate", ""),
    "loss_scale": ("Loss scale", "The factor by which fp16 gradients are multiplied."),
    "nonfinite": ("Non-finite gradient entries", "Entries of the gradient that are NaN or Inf."),
}
"""The title and the caption of each column that is drawn, in the order of the page."""
_DECADES = 100
_NOT_SHOWN_IF = {"nonfinite": 0, "loss_scale": 1}
"""Constant values that need no chart: no non-finite entries, no loss scaling."""


def scalar_charts(table: pa.Table, event_steps: Iterable[int]) -> list[PageChart]:
    """One chart per recorded number, in the order of the page."""
    if not table.num_rows:
        return []
    parts = list(by_part(table))
    steps = whole_numbers(table, "step")
    events = sorted(set(event_steps))
    found = []
    own = [name for name in table.column_names if name.startswith("signal.")]
    for name in [*_CHARTS, *own]:
        column = measured(table, name)
        if column is None:
            continue
        chart = _chart(name)
        for part, rows in parts:
            rows = rows[column[1][rows]]
            if len(rows):
                chart["series"].extend(_series(name, part, steps[rows], column[0][rows], events))
        if name == "grad_norm" and (clipped := _clipped(table, parts, steps, column[0], events)):
            chart["series"].extend(clipped)
            chart["caption"] = "Before clipping. Dots: after clipping."
        chart["log"] = chart["log"] or (name == "loss" and _spans_decades(column[0][column[1]]))
        chart = without_constants(chart)
        if chart.get("flat") != _NOT_SHOWN_IF.get(name, math.nan):
            found.append(chart)
    return found


def _chart(name: str) -> PageChart:
    title, caption = _CHARTS.get(name) or (name.removeprefix("signal."), "Recorded by your code.")
    return {
        "id": name,
        "title": title,
        "caption": caption,
        "log": name in ("grad_norm", "loss_scale"),
        "unit": "",
        "series": [],
    }


def _spans_decades(values: Numbers) -> bool:
    """Whether a linear scale would show most of these values as one flat line: all positive, over two decades."""
    finite = values[np.isfinite(values)]
    if not len(finite) or finite.min() <= 0:
        return False
    low, high = np.quantile(finite, (0.02, 0.98))  # not for one spike: values outside the scale are marked
    return bool(high > _DECADES * low)


def _series(name: str, part: str, steps: Numbers, values: Numbers, events: list[int]) -> list[PageSeries]:
    rough = name in ("loss", "grad_norm") or name.startswith("signal.")
    label = _CHARTS[name][0].lower() if name in _CHARTS else name.removeprefix("signal.")
    made = [one_series(label, part, "raw" if rough else "line", steps, values, events)]
    if rough:
        line_steps, line = smoothed(steps, values)
        if len(line):
            made.append(one_series(f"{label}, smoothed", part, "smooth", line_steps, line, ()))
        else:
            made[0]["role"] = "line"
    return made


def one_series(name: str, part: str, role: Role, steps: Numbers, values: Numbers, events: Iterable[int]) -> PageSeries:
    """A series of the page, downsampled."""
    chosen = kept_with(steps, values, events)
    return {
        "name": name,
        "part": part,
        "role": role,
        "x": steps[chosen].tolist(),
        "y": numbers(values[chosen]),
        "constant": bool(len(values) > 1 and np.all(values == values[0])),
    }


def _clipped(
    table: pa.Table, parts: list[tuple[str, Numbers]], steps: Numbers, norms: Numbers, events: list[int]
) -> list[PageSeries]:
    """The norm after clipping, at the steps that were clipped."""
    column = measured(table, "clip_factor")
    if column is None:
        return []
    found = []
    for part, rows in parts:
        clipped = rows[(column[1] & (column[0] < 1) & (column[0] > 0))[rows] & np.isfinite(norms[rows])]
        if len(clipped):
            left = norms[clipped] * column[0][clipped]
            found.append(one_series("after clipping", part, "clipped", steps[clipped], left, events))
    return found


def without_constants(chart: PageChart) -> PageChart:
    """The chart for the page. If all series have the same constant value, the chart is replaced with that value."""
    values = [series["y"][0] for series in chart["series"]]
    if all(series.get("constant") for series in chart["series"]) and len(set(values)) == 1 and chart["id"] != "loss":
        chart["flat"] = values[0]
    for series in chart["series"]:
        series.pop("constant", None)
    return chart
