"""Sampled steps that are over, and whose numbers are still on their way from a device."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from surefoot.watch.deferred import Lost, begin_copy, read

if TYPE_CHECKING:
    from collections.abc import Callable

    from surefoot.record.facts import SampledStep
    from surefoot.watch.deferred import Copy


class _Arriving(NamedTuple):
    facts: SampledStep
    copy: Copy | None
    """Brings the last of its numbers; `None` if there is nothing to wait for."""
    is_complete: bool


class ArrivingSteps:
    """Passes sampled steps on, in their order, once all their numbers are there."""

    def __init__(self, keep: Callable[[SampledStep], None]) -> None:
        self._keep = keep
        self.steps: list[_Arriving] = []
        self.count = 0
        """How many steps there have been, those that have arrived included."""

    def add(self, facts: SampledStep, has_deferred: bool) -> None:
        """A sampled step has ended; `has_deferred`: some of its numbers may be on a device."""
        self.count += 1
        self.steps.append(_Arriving(facts, begin_copy() if has_deferred else None, not has_deferred))

    def settle(self, wait: bool) -> None:
        """Pass on the steps that are complete; with `wait`, all. Those that a device has lost are dropped."""
        while self.steps and (wait or self.steps[0].copy is None or self.steps[0].copy.has_arrived()):
            first = self.steps.pop(0)
            try:
                facts = first.facts if first.is_complete else read(first.facts)
            except Lost:
                continue
            self._keep(facts)
