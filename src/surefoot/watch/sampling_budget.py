"""How much of a run's time sampled steps may take.

The first ones are sampled whatever they cost. After them, sampled steps may take two percent of the measured time since
the first step, and a fraction of a second at the beginning, so that short runs are sampled as well.
"""

from __future__ import annotations

import time

SHARE = 0.02
SECONDS_AT_FIRST = 0.4
EXTRA = 3.0
"""When something new begins, steps are sampled up to so many times the budget."""


class SamplingBudget:
    """What sampled steps have cost, and whether there is time for another one."""

    def __init__(self) -> None:
        self._began: float | None = None
        self.spent = 0.0
        """Seconds that sampled steps have taken."""
        self._last = 0.0

    def begin(self) -> None:
        """The run's time counts from the first call on."""
        if self._began is None:
            self._began = time.perf_counter()

    def pay(self, seconds: float) -> None:
        """A step was sampled for so many seconds."""
        self.spent += seconds
        self._last = seconds

    def allows(self, times: float = 1.0) -> bool:
        """Whether one more step may be sampled, if it costs what the last one did, within so many budgets."""
        elapsed = 0.0 if self._began is None else time.perf_counter() - self._began
        return self.spent + self._last <= times * (SECONDS_AT_FIRST + SHARE * elapsed)
