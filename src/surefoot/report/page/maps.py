"""Data of the maps over time: one row per layer or rank, one column per interval of steps, one packed number per cell.

A cell shows the largest value of its steps, so that outliers are visible at every zoom; a cell with a non-finite value
is marked as such. Cells are 16-bit codes between the limits of the map, on a logarithmic scale if values span decades.
The highest codes are for values outside any scale. One of them is for a parameter that was sampled and had no gradient,
which is neither zero nor NaN.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from surefoot.report.page.columns import by_appearance, coded_layers, measured, whole_numbers
from surefoot.report.page.encode import packed

if TYPE_CHECKING:
    import pyarrow as pa

    from surefoot.record.rank_table import RankTable
    from surefoot.report.page.columns import Numbers
    from surefoot.report.page.sections import LayerMap, MapCells


MOST_COLUMNS = 600
_TOP = 65_000
NONE, ZERO, NONFINITE, MISSING = 65_532, 65_533, 65_534, 65_535
"""Codes beyond the scale: no gradient, exactly zero on a logarithmic scale, not finite, and not measured."""

_LAYER_MAPS = (
    ("grad_norm", "Gradient norm by layer", True, "Each cell shows the largest value of its steps."),
    (
        "update_ratio",
        "Update-to-weight ratio by layer",
        True,
        "Around 10⁻³ is usual. Blue: small updates. Red: large updates.",
    ),
    ("dead_share", "Dead units by layer", False, "Share of units that are zero for every input."),
    ("saturated_share", "Saturated activations by layer", False, "Share of outputs at a bound of a sigmoid or tanh."),
    ("activation_std", "Deviation of activations by layer", True, "Healthy layers stay within a few decades of 1."),
    (
        "activation_largest",
        "Largest activation by layer",
        True,
        "The largest absolute value. The limit of fp16 is 65,504.",
    ),
    ("activation_mean", "Mean activation by layer", True, "The absolute value of the mean."),
)


def layer_maps(table: pa.Table) -> list[LayerMap]:
    """The maps for which the run has data."""
    if not table.num_rows:
        return []
    steps = whole_numbers(table, "step")
    rows, names = by_appearance(*coded_layers(table))
    bad = measured(table, "nonfinite")
    broken = (bad[1] & (bad[0] > 0)) if bad is not None else np.zeros(len(steps), dtype=bool)
    found: list[LayerMap] = []
    for name, title, logarithmic, caption in _LAYER_MAPS:
        column = measured(table, name)
        if column is None:
            continue
        values = np.abs(column[0]) if name == "activation_mean" else column[0]
        here = slice(None) if column[1].all() else column[1]  # millions of rows are not copied if nothing is filtered
        if name == "update_ratio":
            here = column[1] & ~_from_zero(table, column[0])
        none = _without_gradient(table, column[1]) if name == "grad_norm" else np.zeros_like(broken)
        if none.any():
            here = column[1] | none
        bad_here = broken[here] if name == "grad_norm" else np.zeros_like(broken[here])
        cells = _cells(steps[here], rows[here], values[here], bad_here, none[here], len(names))
        found.append({"id": name, "title": title, "caption": caption, **as_map(cells, names, logarithmic)})
    return [a_map for a_map in found if a_map["rows"]]


def _without_gradient(table: pa.Table, has_gradient: Numbers) -> Numbers:
    """Parameters that were sampled and had no gradient."""
    norms = measured(table, "param_norm")
    return np.zeros_like(has_gradient) if norms is None else norms[1] & ~has_gradient


def _from_zero(table: pa.Table, ratios: Numbers) -> Numbers:
    """Parameters that were all zeros and changed, as biases do at the first step: Inf by definition, and harmless."""
    norms = measured(table, "param_norm")
    if norms is None:
        return np.zeros(len(ratios), dtype=bool)
    return np.asarray(np.isposinf(ratios) & norms[1] & np.isfinite(norms[0]))


def _cells(
    steps: Numbers, rows: Numbers, values: Numbers, broken: Numbers, none: Numbers, height: int
) -> tuple[Numbers, Numbers, Numbers, Numbers]:
    """The first step of each column, each cell's largest value, and whether it is non-finite or lacks a gradient."""
    starts, columns = time_columns(steps)
    places = rows * len(starts) + columns
    largest = np.full(height * len(starts), -np.inf)
    finite = np.isfinite(values)
    np.maximum.at(largest, places, np.where(finite, values, -np.inf))
    odd = np.zeros(height * len(starts), dtype=bool)
    odd[places[(~finite & ~none) | broken]] = True
    without = np.zeros(height * len(starts), dtype=bool)
    without[places[none]] = True
    return starts, largest.reshape(height, -1), odd.reshape(height, -1), without.reshape(height, -1)


def time_columns(steps: Numbers, most: int = MOST_COLUMNS) -> tuple[Numbers, Numbers]:
    """The first step of each column, and the column of each row. Intervals without a row have no column."""
    distinct, columns = _distinct(steps)
    if len(distinct) <= most:
        return distinct, columns
    low, span = distinct[0], distinct[-1] - distinct[0] + 1
    used, columns = _distinct((steps - low) * most // span)
    return low + -(-used * span // most), columns


def _distinct(values: Numbers) -> tuple[Numbers, Numbers]:
    """The distinct values, and the index of each row's value. Tables are sorted by step, so no sort is needed."""
    changes = np.diff(values)
    if len(values) and (changes < 0).any():
        found: tuple[Numbers, Numbers] = np.unique(values, return_inverse=True)
        return found
    new = np.ones(len(values), dtype=bool)
    new[1:] = changes > 0
    return values[new], np.cumsum(new, dtype=np.int32) - 1


def as_map(cells: tuple[Numbers, Numbers, Numbers, Numbers], names: list[str], logarithmic: bool) -> MapCells:
    """The cells of a map, packed.

    Args:
        cells: where columns begin, the value of each cell (minus infinity for none), whether it is not finite, and
            whether it lacks a gradient.
        names: what the rows are called.
        logarithmic: whether the scale is.
    """
    starts, values, odd, without = cells
    seen = np.flatnonzero((np.isfinite(values) | odd | without).any(axis=1))
    values, odd, without = values[seen], odd[seen], without[seen]
    finite = np.isfinite(values)
    shown = finite & (values > 0) if logarithmic else finite
    scaled = np.where(shown, values, 1.0)
    scaled = np.log10(scaled) if logarithmic else scaled
    low, high = _ends(scaled[shown], logarithmic)
    codes = np.full(values.shape, MISSING, dtype=np.uint16)
    codes[without] = NONE
    codes[finite] = ZERO if logarithmic else 0
    spread = (scaled - low) / (high - low)
    codes[shown] = np.clip(np.rint(spread[shown] * _TOP), 0, _TOP).astype(np.uint16)
    codes[odd] = NONFINITE
    return {
        "rows": [names[row] for row in seen.tolist()],
        "columns": starts.tolist(),
        "log": logarithmic,
        "low": low,
        "high": high,
        "colours": _colour_ends(scaled[shown], logarithmic, low, high),
        "cells": packed(codes),
    }


def _ends(values: Numbers, logarithmic: bool) -> tuple[float, float]:
    if not logarithmic:
        return 0.0, 1.0
    if not len(values):
        return -1.0, 0.0
    low, high = float(values.min()), float(values.max())
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _colour_ends(values: Numbers, logarithmic: bool, low: float, high: float) -> list[float]:
    """The range of the colours: one cell of 1e20 must not make all others look the same."""
    if not logarithmic or not len(values):
        return [low, high]
    bottom, top = (float(end) for end in np.quantile(values, [0.01, 0.99]))
    return [bottom, top] if top - bottom > 0.3 else [bottom - 0.5, top + 0.5]


_RANK_MAPS = (
    ("step_seconds", 1, "Step time by rank", "Seconds per step, the longest of each interval."),
    (
        "grad_norm",
        1,
        "Gradient norm by rank",
        "The largest of each interval. Averaged gradients are equal on all ranks.",
    ),
    ("memory", 2**20, "Memory by rank", "MiB, the largest of each interval."),
)
"""The columns of the table: name, unit, title and caption."""


def rank_maps(table: RankTable | None) -> list[LayerMap]:
    """The maps for which the ranks have data; none for a run of one process."""
    if table is None or len(table.ranks) < 2:
        return []
    names = [f"rank {rank}" for rank in table.ranks]
    found: list[LayerMap] = []
    for kind, unit, title, caption in _RANK_MAPS:
        values = np.stack(getattr(table, kind)) / unit
        broken = np.isinf(values)
        shown = np.where(np.isfinite(values), values, -np.inf)
        cells = np.asarray(table.starts), shown, broken, np.zeros_like(broken)
        made = as_map(cells, names, logarithmic=True)
        if made["rows"]:
            found.append({"id": f"rank_{kind}", "title": title, "caption": caption, **made})
    return found
