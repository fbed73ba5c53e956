"""The numbers of every step: loss, gradient norm, learning rate, and the like, one row per optimizer step.

A number may be a tensor on a device. It is copied without waiting and read some steps later; what the guard measured
arrives later too. Rows are written to the run log in their order, once they are complete. A long run is thinned in the
middle: the first thousand and the last two thousand rows are always complete.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict, cast

import torch
from torch import Tensor

from surefoot.core.device import begin_reading, is_fatal
from surefoot.record.facts import StepSeries

if TYPE_CHECKING:
    from collections.abc import Callable

    from surefoot.core.device import AsyncCopy

HEAD, TAIL, MOST = 1_000, 2_000, 8_000
READ_STEPS_LATER = 8
"""So many steps later a number on a device is read; by then it has arrived."""


class ClipColumns(TypedDict, total=False):
    """The columns of `StepSeries` about clipping, for one step."""

    clip_norm: Tensor | float | None
    clip_limit: float | None
    clip_by_value: bool


class SeriesRow(ClipColumns, total=False):
    """One step: the columns of `StepSeries`. A tensor is on its way from a device."""

    grad_norm: Tensor | float | None
    skipped: Tensor | bool | float
    closure: int
    loss: Tensor | float | None
    backwards: int
    lr: Tensor | float | None
    scale: float
    roots: int
    at: int
    step: int
    leftover: Tensor | float


@dataclass
class _IncompleteRow:
    """A row that is not complete yet."""

    row: SeriesRow
    copies: list[tuple[list[str], AsyncCopy]]
    waits_for_guard: bool

    def read(self) -> None:
        """Put the numbers that were copied into the row; `None` for those that a failed device has not sent."""
        for keys, copy in self.copies:
            try:
                values = copy.wait().tolist()
            except RuntimeError as error:
                if not is_fatal(error):
                    raise
                values = [None] * len(keys)
            self.row.update(cast("SeriesRow", dict(zip(keys, values, strict=True))))
        self.copies = []


class StepRows:
    """Rows of one optimizer's steps."""

    def __init__(self, write_row: Callable[[SeriesRow], None] = lambda row: None) -> None:
        """`write_row` is called with each row once all its numbers are read."""
        self._write_row = write_row
        self.rows: list[SeriesRow] = []
        self.count = 0
        self._waiting: deque[_IncompleteRow] = deque()

    def append(self, row: SeriesRow, waits_for_guard: bool = False) -> None:
        """Add the row of the next step; its number is the count so far."""
        copies = _copies(row)
        row["step"] = self.count
        self.count += 1
        self.rows.append(row)
        self._waiting.append(_IncompleteRow(row, copies, waits_for_guard))
        self._write_complete(READ_STEPS_LATER)
        if len(self.rows) > MOST:
            self.rows = self.rows[:HEAD] + self.rows[HEAD:-TAIL:2] + self.rows[-TAIL:]

    def arrived(self, row: SeriesRow) -> None:
        """The numbers of the guard are in a row now."""
        for waiting in self._waiting:
            if waiting.row is row:
                waiting.waits_for_guard = False
        self._write_complete(READ_STEPS_LATER)

    def _write_complete(self, later: int) -> None:
        """Write the rows at the front that are complete; copies are read `later` steps after they began."""
        while self._waiting:
            first = self._waiting[0]
            if first.waits_for_guard or (first.copies and len(self._waiting) <= later):
                return
            first.read()
            self._write_row(self._waiting.popleft().row)

    @property
    def waits(self) -> bool:
        """Whether some rows are not complete yet."""
        return bool(self._waiting)

    def read(self) -> None:
        """Complete every row. Waits for the device."""
        for waiting in self._waiting:
            waiting.waits_for_guard = False
        self._write_complete(0)

    def as_facts(self) -> StepSeries:
        """The rows as columns; a column that no row has is empty."""
        self.read()
        keys = dict.fromkeys(key for row in self.rows for key in row)
        columns: dict[str, list[Any]] = {key: [row.get(key) for row in self.rows] for key in keys}
        return StepSeries(**columns)


def _copies(row: SeriesRow) -> list[tuple[list[str], AsyncCopy]]:
    """Begin to copy the numbers of a row that are on a device, one vector per device."""
    by_device: dict[torch.device, list[str]] = {}
    tensors = {key: value for key, value in row.items() if isinstance(value, Tensor)}
    for key, value in tensors.items():
        by_device.setdefault(value.device, []).append(key)
    return [
        (keys, begin_reading(torch.stack([tensors[key].detach().reshape(()).to(torch.float64) for key in keys])))
        for keys in by_device.values()
    ]
