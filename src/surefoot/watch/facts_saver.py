"""Writes the facts during the run, so that a killed run can be diagnosed."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from surefoot.record.facts import RunFacts
    from surefoot.watch.context import WatchContext

FIRST_SAVE_S = 15.0
"""The time in seconds until the facts are first written."""
LONGEST_WAIT_S = 300.0
GROWTH = 1.5
"""Each interval is longer than the one before by this factor …"""
SHARE = 0.01
"""… or so long that saving takes no more than this share of the time."""


class FactsSaver:
    """Saves the facts at growing intervals."""

    def __init__(self, context: WatchContext, facts: Callable[[bool], RunFacts]) -> None:
        """`facts(at_end)` returns the facts so far."""
        self._save, self._safely, self._facts = context.options.save, context.probes.safely, facts
        self._wait_s = FIRST_SAVE_S
        self._due_at = time.monotonic() + FIRST_SAVE_S

    def save_if_due(self) -> None:
        """Save, unless it was done recently."""
        if self._save is not None and time.monotonic() >= self._due_at:
            began = time.monotonic()
            self._safely("saving", self.save)
            now = time.monotonic()
            self._wait_s = min(LONGEST_WAIT_S, GROWTH * self._wait_s)
            self._due_at = now + max(self._wait_s, (now - began) / SHARE)

    def save(self, at_end: bool = False) -> None:
        """Save now; with `at_end`, the sampled step in progress ends first."""
        if self._save is not None:
            self._save(self._facts(at_end))
