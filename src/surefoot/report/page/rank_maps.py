"""Data of rank-by-time maps: one row per rank, one column per interval of steps, as in the maps of layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from surefoot.report.page.layer_maps import as_map

if TYPE_CHECKING:
    from surefoot.record.rank_table import RankTable
    from surefoot.report.page.sections import LayerMap

_MAPS = (
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
    for kind, unit, title, caption in _MAPS:
        values = np.stack(getattr(table, kind)) / unit
        broken = np.isinf(values)
        shown = np.where(np.isfinite(values), values, -np.inf)
        cells = np.asarray(table.starts), shown, broken, np.zeros_like(broken)
        made = as_map(cells, names, logarithmic=True)
        if made["rows"]:
            found.append({"id": f"rank_{kind}", "title": title, "caption": caption, **made})
    return found
