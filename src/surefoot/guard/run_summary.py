"""The result of `TrainingStabilizer.summary()`: text that a notebook shows as HTML."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from surefoot.core.notebook_html import heading, page, table, text
from surefoot.types import format_number, format_table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class RunSummary(str):
    """Counts, the last incidents, and the layers of the last step with the largest gradients."""

    counts: Mapping[str, int]
    incidents: tuple[str, ...]
    layers: tuple[Mapping[str, Any], ...]

    def __new__(
        cls, counts: Mapping[str, int], incidents: Sequence[str] = (), layers: Sequence[Mapping[str, Any]] = ()
    ) -> RunSummary:
        """Write the text."""
        lines = [_counted(counts), *incidents, *(["", format_table(layers)] if layers else [])]
        summary = super().__new__(cls, "\n".join(lines))
        summary.counts, summary.incidents, summary.layers = dict(counts), tuple(incidents), tuple(layers)
        return summary

    def _repr_html_(self) -> str:
        """HTML for a notebook: incidents first, then the counts and the layers."""
        columns = tuple(self.layers[0]) if self.layers else ()
        rows = [tuple(_shown(row[column]) for column in columns) for row in self.layers]
        return page(
            heading("warning" if self.incidents else "no incidents", _counted(self.counts)),
            *(text(incident) for incident in self.incidents),
            *([table(columns, rows)] if rows else []),
        )


def _counted(counts: Mapping[str, int]) -> str:
    """For example "100 steps, 99 applied, 1 alarm": plural names lose their "s" for 1."""
    return ", ".join(f"{count:,} {name.removesuffix('s') if count == 1 else name}" for name, count in counts.items())


def _shown(value: Any) -> str:
    return "none" if value is None else format_number(value)
