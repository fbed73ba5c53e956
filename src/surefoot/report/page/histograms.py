"""Data of histograms over time: for each layer and kind, a column per recorded step and a row per bin.

A cell is the share of a tensor's values in a bin, in units of 1/255, so that layers of any size can be compared. Bins
that no histogram of a kind uses are omitted. Bins near zero with very few values are merged on each side; otherwise
they would fill most of the chart. If there are very many histograms, each has fewer columns, so that the page stays
small.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from surefoot.record.arrays import to_numpy
from surefoot.report.page.columns import coded, coded_layers, whole_numbers
from surefoot.report.page.encode import packed
from surefoot.report.page.maps import time_columns

if TYPE_CHECKING:
    import pyarrow as pa

    from surefoot.report.page.columns import Numbers
    from surefoot.report.page.sections import HistogramColumns, HistogramSection, LayerHistogram

_BYTES, _MOST, _FEWEST = 3_000_000, 160, 12
_NEXT_TO_NOTHING = 0.02
"""The share of a tensor's values that may be merged into one bin beside zero."""
_NONFINITE = ("nan", "positive_inf", "negative_inf")
_KINDS = ("weight", "gradient", "activation")


def layer_histograms(table: pa.Table) -> HistogramSection | None:
    """The histograms of all layers; `None` if the run recorded none."""
    if not table.num_rows:
        return None
    from surefoot.record.bins import EDGES

    counts = _counts(table)
    if counts.shape[1] != len(EDGES) - 1:
        return None  # written by a version with other bins
    kinds, kind_names = coded(table, "kind")
    layers, layer_names = coded_layers(table)
    steps = whole_numbers(table, "step")
    odd = [whole_numbers(table, name) for name in _NONFINITE]
    both = kinds * len(layer_names) + layers
    most = int(np.clip(_BYTES // max(1, len(np.unique(both)) * counts.shape[1]), _FEWEST, _MOST))
    items: list[LayerHistogram] = []
    all_edges: dict[str, list[float]] = {}
    for kind in sorted(range(len(kind_names)), key=lambda code: _order(kind_names[code])):
        rows_of_kind = np.flatnonzero(kinds == kind)
        rows_counts, edges = _fitted(counts[rows_of_kind], EDGES)
        for layer in np.unique(layers[rows_of_kind]).tolist():
            mine = layers[rows_of_kind] == layer
            rows = rows_of_kind[mine]
            item = _over_time(steps[rows], rows_counts[mine], [column[rows] for column in odd], most)
            items.append({"kind": kind_names[kind], "layer": layer, **item})
        all_edges[kind_names[kind]] = edges
    return {"layers": layer_names, "edges": all_edges, "items": items}


def _order(kind: str) -> int:
    return _KINDS.index(kind) if kind in _KINDS else len(_KINDS)


def _counts(table: pa.Table) -> Numbers:
    column = table.column("counts").combine_chunks()
    column = column if hasattr(column, "flatten") else column.chunk(0)
    return to_numpy(column.flatten(), null=0).astype(np.float32).reshape(table.num_rows, -1)


def _fitted(counts: Numbers, edges: Sequence[float]) -> tuple[Numbers, list[float]]:
    """The counts over the relevant bins, and their edges."""
    middle = counts.shape[1] // 2  # exactly zero
    reach = np.arange(counts.shape[1])
    used = np.flatnonzero(counts.any(axis=0) & (reach != middle))
    widest = max(2, int(np.abs(used - middle).max()) + 1 if len(used) else 2)
    widest = min(widest, middle)
    total = np.maximum(counts.sum(axis=1), 1)
    joined = 1
    while joined < widest - 2:
        inner = counts[:, middle - joined - 1 : middle + joined + 2].sum(axis=1) - counts[:, middle]
        if (inner / total).max() > _NEXT_TO_NOTHING:
            break
        joined += 1
    left = counts[:, middle - joined : middle].sum(axis=1, keepdims=True)
    right = counts[:, middle + 1 : middle + joined + 1].sum(axis=1, keepdims=True)
    pieces = [
        counts[:, middle - widest : middle - joined],
        left,
        counts[:, middle : middle + 1],
        right,
        counts[:, middle + joined + 1 : middle + widest + 1],
    ]
    negative = list(edges[middle - widest : middle - joined + 1])
    positive = list(edges[middle + joined + 1 : middle + widest + 2])
    return np.concatenate(pieces, axis=1), [*negative, edges[middle], edges[middle + 1], *positive]


def _over_time(steps: Numbers, counts: Numbers, odd: list[Numbers], most: int) -> HistogramColumns:
    starts, columns = time_columns(steps, most)
    summed = np.zeros((len(starts), counts.shape[1]))
    np.add.at(summed, columns, counts)
    total = np.maximum(summed.sum(axis=1, keepdims=True), 1)
    share = summed / total
    # A bin with few values must remain visible: at least 1/255.
    cells = np.where(share > 0, np.maximum(np.rint(share * 255), 1), 0).astype(np.uint8)
    not_finite = np.zeros((len(odd), len(starts)), dtype=np.int64)
    for row, values in enumerate(odd):
        np.maximum.at(not_finite[row], columns, values)
    return {
        "columns": starts.tolist(),
        "bins": counts.shape[1],
        "cells": packed(np.ascontiguousarray(cells.T)),
        "odd": dict(zip(_NONFINITE, not_finite.tolist(), strict=True)) if not_finite.any() else None,
    }
