"""Facts that are complete except for numbers that are still being copied from a device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from surefoot.watch.deferred import Lost, begin_copy, read

if TYPE_CHECKING:
    from collections.abc import Callable

    from surefoot.watch.deferred import Copy

_T = TypeVar("_T")


class _OnTheWay(NamedTuple, Generic[_T]):
    facts: _T
    copy: Copy | None
    """Brings the last of its numbers; `None` if there is nothing to wait for."""
    is_complete: bool


class Arriving(Generic[_T]):
    """Passes facts on, in their order, once all their numbers are there."""

    def __init__(self, keep: Callable[[_T], None]) -> None:
        self._keep = keep
        self.waiting: list[_OnTheWay[_T]] = []
        self.count = 0
        """How many there have been, those that have arrived included."""

    def add(self, facts: _T, has_deferred: bool) -> None:
        """Take facts in; `has_deferred`: some of their numbers may be on a device."""
        self.count += 1
        self.waiting.append(_OnTheWay(facts, begin_copy() if has_deferred else None, not has_deferred))

    def settle(self, wait: bool) -> None:
        """Pass on what is complete; with `wait`, all. What a device has lost is dropped."""
        while self.waiting and (wait or self.waiting[0].copy is None or self.waiting[0].copy.has_arrived()):
            first = self.waiting.pop(0)
            try:
                facts = first.facts if first.is_complete else read(first.facts)
            except Lost:
                continue
            self._keep(facts)
