"""The numbers of every step: loss, gradient norm, learning rate, and the like, one row per optimizer step.

A number may be a tensor on a device. It is copied without waiting and read when it has arrived; what the guard measured
arrives later too. Rows are written to the run log in their order, once they are complete. A long run is thinned in the
middle: the first thousand and the last two thousand rows are always complete.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

from torch import Tensor

from surefoot.core.device import is_fatal
from surefoot.core.device_copies import ArrivingNumber, KnownNumber, begin_reading_number
from surefoot.record.facts import StepSeries
from surefoot.watch.accumulated_loss import ArrivingLoss

if TYPE_CHECKING:
    from collections.abc import Callable

HEAD, TAIL, MOST = 1_000, 2_000, 8_000
_ARRIVING = (ArrivingNumber, KnownNumber, ArrivingLoss)
_KNOWN = (float, int, bool, type(None))


class ClipColumns(TypedDict, total=False):
    """The columns of `StepSeries` about clipping, for one step."""

    clip_norm: Tensor | float | None
    clip_limit: float | None
    clip_by_value: bool


class SeriesRow(ClipColumns, total=False):
    """One step: the columns of `StepSeries`. Tensors are still being copied from a device."""

    grad_norm: Tensor | float | None
    first_gradient: Tensor | float | None
    """Not a column: the largest value of one gradient, for a step that was not measured. See `UnmeasuredSteps`."""
    skipped: Tensor | bool | float
    closure: int
    loss: Tensor | ArrivingNumber | KnownNumber | ArrivingLoss | float | None
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
    numbers: dict[str, ArrivingNumber | KnownNumber | ArrivingLoss]
    waits_for_guard: bool

    def is_complete(self) -> bool:
        """Whether it can be written without waiting."""
        if self.waits_for_guard:
            return False
        for number in self.numbers.values():  # noqa: SIM110, a generator costs a call per number, at each step
            if not number.has_arrived():
                return False
        return True

    def read(self) -> None:
        """Put the copied numbers into the row; `None` for those that a failed device did not return."""
        for key, number in self.numbers.items():
            try:
                self.row[key] = number.wait()  # type: ignore[literal-required]
            except RuntimeError as error:
                if not is_fatal(error):
                    raise
                self.row[key] = None  # type: ignore[literal-required]
        self.numbers = {}


class StepRows:
    """Rows of one optimizer's steps."""

    def __init__(self, write_row: Callable[[SeriesRow], None] = lambda row: None) -> None:
        """`write_row` is called with each row once all its numbers are read."""
        self._write_row = write_row
        self.rows: list[SeriesRow] = []
        self.count = 0
        self._waiting: deque[_IncompleteRow] = deque()

    def append(self, row: SeriesRow, waits_for_guard: bool = False) -> None:
        """Add the row of the next step, whose number is the count so far."""
        numbers: dict[str, ArrivingNumber | KnownNumber | ArrivingLoss] = {}
        for key, value in row.items():
            kind = type(value)
            if kind in _ARRIVING:
                numbers[key] = value  # type: ignore[assignment]
            elif kind not in _KNOWN and isinstance(value, Tensor):
                numbers[key] = begin_reading_number(value)
        row["step"] = self.count
        self.count += 1
        self.rows.append(row)
        if numbers or waits_for_guard or self._waiting:
            self._waiting.append(_IncompleteRow(row, numbers, waits_for_guard))
            self._write_complete()
        else:
            self._write_row(row)
        if len(self.rows) > MOST:
            self.rows = self.rows[:HEAD] + self.rows[HEAD:-TAIL:2] + self.rows[-TAIL:]

    def arrived(self, row: SeriesRow) -> None:
        """The guard's numbers have been put into a row."""
        for waiting in self._waiting:
            if waiting.row is row:
                waiting.waits_for_guard = False
        self._write_complete()

    def _write_complete(self, wait: bool = False) -> None:
        """Write the first rows that are complete; with `wait`, all rows."""
        while self._waiting and (wait or self._waiting[0].is_complete()):
            first = self._waiting.popleft()
            first.read()
            self._write_row(first.row)

    @property
    def waits(self) -> bool:
        """Whether some rows are not complete yet."""
        return bool(self._waiting)

    def read(self) -> None:
        """Complete every row. Waits for the device."""
        self._write_complete(wait=True)

    def as_facts(self) -> StepSeries:
        """The rows as columns; a column that no row has is empty."""
        self.read()
        keys = dict.fromkeys(key for row in self.rows for key in row)
        columns: dict[str, list[Any]] = {key: [row.get(key) for row in self.rows] for key in keys}
        return StepSeries(**columns)
