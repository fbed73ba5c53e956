"""The share of a run's time that sampled steps may take.

The first few are sampled whatever they cost. After them, sampled steps may take two percent of the measured time since
the first step, plus half a second at the beginning, so that short runs are sampled as well. Evaluations have their own,
smaller budget. A single step that took very long (garbage collection, a busy machine) counts as a few usual ones.
Beyond this budget, a step is sampled whenever the number of steps has doubled (`step_sampler`).

On a device, a step takes the host a few milliseconds, and a sampled one ten times as long, mostly in Python. There the
budget at the beginning is smaller, so that a run of a few hundred steps does not consist of sampled steps.
"""

from __future__ import annotations

import time

SHARE = 0.02
SECONDS_AT_FIRST = 0.5
SECONDS_AT_FIRST_ON_DEVICE = 0.1
ALWAYS = 4
"""The number of first steps that are sampled regardless of cost."""
ALWAYS_ON_DEVICE = 3
MOST_USUAL = 4.0
"""A step counts as at most this many usual ones."""
REMEMBERED = 9
EXTRA = 3.0
"""When something new begins, steps are sampled up to this multiple of the budget."""


class SamplingBudget:
    """Adds up the cost of sampled steps, and decides whether there is time for another one."""

    def __init__(self, part: float = 1.0) -> None:
        """`part` is the fraction of the usual budget."""
        self._part = part
        self.is_on_device = False
        """Whether parameters on a device are trained."""
        self._began: float | None = None
        self._paid = 0
        self._last: list[float] = []
        self._usual = 0.0
        """The median of the last costs."""
        self.spent = 0.0
        """The seconds that sampled steps have taken, except for the first few."""

    def begin(self) -> None:
        """Start measuring the run's time, at the first call."""
        if self._began is None:
            self._began = time.perf_counter()

    def pay(self, seconds: float) -> None:
        """Add the seconds that sampling a step took."""
        self._last = [*self._last[-REMEMBERED + 1 :], seconds]
        # Not `statistics.median`: it calls `sorted`, which a script may have replaced.
        self._usual = sorted(self._last)[len(self._last) // 2]
        self._paid += 1
        if self._paid > (ALWAYS_ON_DEVICE if self.is_on_device else ALWAYS):
            self.spent += min(seconds, MOST_USUAL * self._usual)

    def allows(self, times: float = 1.0, cost: float = 1.0) -> bool:
        """Whether a step with this multiple of the usual cost may be sampled within this multiple of the budget."""
        if self._paid < (ALWAYS_ON_DEVICE if self.is_on_device else ALWAYS):
            return True
        elapsed = 0.0 if self._began is None else time.perf_counter() - self._began
        at_first = SECONDS_AT_FIRST_ON_DEVICE if self.is_on_device else SECONDS_AT_FIRST
        return self.spent + cost * self._usual <= times * self._part * (at_first + SHARE * elapsed)
