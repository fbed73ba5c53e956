"""The numbers of every step: loss, gradient norm, learning rate, and the like, one row per optimizer step.

A number may arrive as a tensor on a device; it is read later, many at a time. A long run is thinned in the middle: the
first thousand and the last two thousand rows are always complete.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from surefoot.record.facts import StepSeries

if TYPE_CHECKING:
    from collections.abc import Callable

HEAD, TAIL, MOST = 1_000, 2_000, 8_000
MOST_UNREAD = 300
READ_SECONDS = 5.0
"""Numbers on a device are read when there are so many, or when the oldest is so old: somebody may be watching."""


class StepRows:
    """Rows of one optimizer's steps."""

    def __init__(self, write_row: Callable[[dict[str, Any]], None] = lambda row: None) -> None:
        """`write_row` is called with each row once all its numbers are read."""
        self._write_row = write_row
        self.rows: list[dict[str, Any]] = []
        self.count = 0
        self._unread: list[tuple[dict[str, Any], str, Tensor]] = []
        self._unwritten: list[dict[str, Any]] = []
        self._read_at = time.monotonic()

    def append(self, row: dict[str, Any]) -> None:
        """Add the row of the next step; its number is the count so far."""
        row["step"] = self.count
        self.count += 1
        for key, value in row.items():
            if isinstance(value, Tensor):
                self._unread.append((row, key, value))
        self.rows.append(row)
        if not self._unread:
            self._write_row(row)
        else:
            self._unwritten.append(row)
            if len(self._unread) >= MOST_UNREAD or time.monotonic() - self._read_at > READ_SECONDS:
                self.read()
        if len(self.rows) > MOST:
            self.rows = self.rows[:HEAD] + self.rows[HEAD:-TAIL:2] + self.rows[-TAIL:]

    @property
    def waits(self) -> bool:
        """Whether some numbers are still on a device."""
        return bool(self._unread)

    def read(self) -> None:
        """Bring every number that is still on a device to the host, in one go per device."""
        by_device: dict[torch.device, list[tuple[dict[str, Any], str, Tensor]]] = {}
        for item in self._unread:
            by_device.setdefault(item[2].device, []).append(item)
        self._unread = []
        for items in by_device.values():
            values = torch.stack([tensor.detach().reshape(()).to(torch.float64) for _, _, tensor in items]).tolist()
            for (row, key, _), value in zip(items, values, strict=True):
                row[key] = value
        unwritten, self._unwritten = self._unwritten, []
        self._read_at = time.monotonic()
        for row in unwritten:
            self._write_row(row)

    def as_facts(self) -> StepSeries:
        """The rows as columns; a column that no row has is empty."""
        self.read()
        keys = dict.fromkeys(key for row in self.rows for key in row)
        columns: dict[str, Any] = {key: [row.get(key) for row in self.rows] for key in keys}
        return StepSeries(**columns)
