"""The record of each optimizer: its settings, the numbers of its steps, and problems that were found.

The optimizer itself is not referenced, so its lifetime does not change. Only the first eight parameter groups are
described.
"""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from surefoot.core.without_hooks import WithoutHooks
from surefoot.observe.readable import readable
from surefoot.record.facts import GroupSettings, OptimizerFacts
from surefoot.watch.deferred import reads_at_once
from surefoot.watch.step_rows import SeriesRow, StepRows
from surefoot.watch.tensor_summary import real

if TYPE_CHECKING:
    from collections.abc import Callable


class OptimizerRecord:
    """One optimizer, held weakly."""

    def __init__(
        self,
        number: int,
        optimizer: torch.optim.Optimizer,
        where: str,
        born_at: int,
        write_row: Callable[[SeriesRow], None],
    ) -> None:
        self.number = number
        self.ref = weakref.ref(optimizer)
        self.type = type(optimizer).__name__
        self.site = where
        self.series = StepRows(write_row)
        self.loaded_at: int | None = None
        self.loaded_age: float | None = None
        self.born_at = born_at
        self.settings = [GroupSettings.of(group) for group in optimizer.param_groups[:8]]
        self.leftover: list[Any] = []
        self.zeroed_before_step = 0
        self.zeroed_between = 0
        self.zero_site = ""
        self.sampled_steps = 0
        self.lines: set[int] = set()
        """The lines of `backward` whose gradients it stepped with, as `StepData` numbers them."""
        self.backwards_at_start = 0
        """The number of backward calls when its step began: a closure makes more during the step."""
        self.row: SeriesRow = {}
        """The row of the current step."""
        self.may_be_healthy = False
        """Whether the current step is measured in full only if its gradient norm is not finite."""
        self.in_flight: dict[int, tuple[SeriesRow, float]] = {}
        """Rows that the guard has not completed yet, and the divisor that their gradient norms still need.

        The key is the number of the step in the guard.
        """

    def is_in_flight(self, row: SeriesRow, taken: int) -> bool:
        """Whether the guard, after this many steps, will still report the step of a row."""
        index = next((number for number, (each, _) in self.in_flight.items() if each is row), None)
        if index is None or taken > index:
            return index is not None
        del self.in_flight[index]
        return False

    def give_up_waiting(self) -> None:
        """The guard reports no further steps: write the waiting rows without its numbers."""
        for row, _ in self.in_flight.values():
            self.series.arrived(row)
        self.in_flight.clear()

    def as_facts(self) -> OptimizerFacts:
        """All that is known about it."""
        return OptimizerFacts(
            number=self.number,
            type=self.type,
            site=self.site,
            settings=self.settings,
            steps=self.series.count,
            created_at_step=self.born_at,
            state_loaded_at_step=self.loaded_at,
            loaded_state_steps=self.loaded_age,
            backward_lines=sorted(self.lines),
            zeroed_before_step=self.zeroed_before_step,
            zeroed_between=self.zeroed_between or None,
            zero_site=self.zero_site,
            series=self.series.as_facts(),
        )


class OptimizerRecords:
    """Every optimizer of the run, and which of them have stepped in the current round."""

    def __init__(self) -> None:
        self.all: list[OptimizerRecord] = []
        self._round: set[int] = set()
        self._known = 0
        """The number of optimizers when the current round began."""

    def find(self, optimizer: torch.optim.Optimizer) -> OptimizerRecord | None:
        """The record of an optimizer, or of the one that it wraps: both share their parameter groups."""
        for record in self.all:
            if record.ref() is optimizer:
                return record
        groups = optimizer.param_groups
        return next((record for record, held in self.alive() if held.param_groups is groups), None)

    def alive(self) -> list[tuple[OptimizerRecord, torch.optim.Optimizer]]:
        """The optimizers that still exist, with their records."""
        return [(record, optimizer) for record in self.all if (optimizer := record.ref()) is not None]

    def stepped(self, record: OptimizerRecord) -> bool:
        """Record a step; returns whether it begins a new round.

        A round ends when one of its optimizers steps again, or one that was made after it began: the next phase.
        """
        begins = record.number in self._round or record.number >= self._known
        if begins:
            self._round, self._known = set(), len(self.all)
        self._round.add(record.number)
        return begins

    def is_due(self, record: OptimizerRecord) -> bool:
        """Whether an optimizer has not stepped yet in the current round, and others have."""
        return record.number not in self._round


def left_share(tensors: list[Tensor]) -> Any:
    """The share of the parameters that still has a nonzero gradient; on a device, a tensor to be read later."""
    with WithoutHooks():
        held = [local for t in tensors if t.grad is not None and (local := readable(t.grad)) is not None]
        held = [real(grad.detach()) for grad in held if grad.layout is torch.strided and grad.numel()]
        if all(map(reads_at_once, held)):
            return sum(bool((grad != 0).any()) for grad in held) / max(1, len(tensors))
        home = held[0].device
        largest = [torch.linalg.vector_norm(grad, math.inf).to(home) for grad in held]
        return (torch.stack([each != 0 for each in largest]).sum(dtype=torch.float64) / max(1, len(tensors))).detach()


def least(shares: list[Any]) -> Any:
    """The smallest share. Does not wait if some are on a device."""
    away = [share for share in shares if isinstance(share, Tensor)]
    if not away:
        return min(shares)
    return torch.stack(
        [share if isinstance(share, Tensor) else torch.full_like(away[0], share) for share in shares]
    ).min()
