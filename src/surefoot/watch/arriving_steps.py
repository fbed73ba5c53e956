"""Holds facts back until their last numbers have been copied from a device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from surefoot.watch.deferred import Lost, begin_copy, read

if TYPE_CHECKING:
    from collections.abc import Callable

    from surefoot.watch.deferred import Copy

_T = TypeVar("_T")


class _QueuedFacts(NamedTuple, Generic[_T]):
    facts: _T
    copy: Copy | None
    """The copy that contains the last of the numbers; `None` if there is nothing to wait for."""
    is_complete: bool


class ArrivalQueue(Generic[_T]):
    """Passes facts on, in their order, once all their numbers have arrived."""

    def __init__(self, keep: Callable[[_T], None]) -> None:
        self._keep = keep
        self.waiting: list[_QueuedFacts[_T]] = []
        self.count = 0
        """The number of facts added so far, including those that have been passed on."""

    def add(self, facts: _T, has_deferred: bool) -> None:
        """Add facts; `has_deferred` is true if some of their numbers may be on a device."""
        self.count += 1
        self.waiting.append(_QueuedFacts(facts, begin_copy() if has_deferred else None, not has_deferred))

    def settle(self, wait: bool) -> None:
        """Pass on complete facts, or all with `wait`. Facts whose numbers a device has lost are dropped."""
        while self.waiting and (wait or self.waiting[0].copy is None or self.waiting[0].copy.has_arrived()):
            first = self.waiting.pop(0)
            try:
                facts = first.facts if first.is_complete else read(first.facts)
            except Lost:
                continue
            self._keep(facts)
