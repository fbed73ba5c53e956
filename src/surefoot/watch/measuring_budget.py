"""Which steps on a device are measured in full: their gradients layer by layer, and the numbers of their data.

The loss, the learning rate and the norm that the script clips by are known for every step. Measuring all gradients
takes the device almost no time, but the host a millisecond or more, and if the host is slower than the device, this
makes the step longer. So the first steps are all measured, and those after a problem; in between, as many as one
percent of the run's time allows, and at least one in seven, or one in 31 if the script clips by norm, so that the norm
is known anyway. With `--guard`, every step is measured, because every step is judged. On a CPU, every step is measured
(`measured_steps`).
"""

from __future__ import annotations

import time

FIRST_STEPS = 64
"""The number of first steps that are always measured."""
STEPS_AFTER_TROUBLE = 64
"""The number of steps measured after a loss that is not finite, or far above the others."""
SPIKES_FOLLOWED = 3
"""The number of loss spikes after each of which more steps are measured. Some runs have spikes all the time."""
SECONDS_AT_FIRST = 0.05
"""The time that steps after the first ones may take before a share of the run's time is available."""
SHARE = 0.01
LONGEST_GAP = 7
"""At least one of this many steps is measured. Odd, so that effects at every 2nd, 4th or 8th step are observed."""
LONGEST_GAP_WITH_NORMS = 31
"""The same if the norm of the gradients is known for the steps in between."""


class MeasuringBudget:
    """Adds up the cost of measuring, and decides whether the next step is measured."""

    def __init__(self) -> None:
        self.measures = True
        """Whether the current step is measured."""
        self.measured_all = True
        """Whether every step so far was measured."""
        self.norms_are_known = False
        """Whether the script computed the norm of the gradients in the last step that was not measured."""
        self._spent = 0.0
        self._began: float | None = None
        self._last = 0
        self._always_until = FIRST_STEPS
        self._spikes = 0

    def spend(self, seconds: float) -> None:
        """Add the time that measuring a step on a device, or a part of it, has taken."""
        self._spent += seconds

    def expect_trouble(self, step: int) -> None:
        """A problem occurred at a step: measure the following ones."""
        self._always_until = max(self._always_until, step + STEPS_AFTER_TROUBLE)

    def after_spike(self, step: int) -> None:
        """The loss was far above the others: measure the following steps, unless there were too many spikes already."""
        self._spikes += 1
        if self._spikes <= SPIKES_FOLLOWED:
            self.expect_trouble(step)

    def begin_step(self, step: int) -> None:
        """Decide whether to measure a step."""
        now = time.perf_counter()
        if self._began is None or step == FIRST_STEPS:  # kernels were compiled until then, which happens only once
            self._began, self._spent = now, 0.0
        is_paid_for = self._spent <= SECONDS_AT_FIRST + SHARE * (now - self._began)
        longest = LONGEST_GAP_WITH_NORMS if self.norms_are_known else LONGEST_GAP
        self.measures = is_paid_for or step < self._always_until or step - self._last >= longest
        if self.measures:
            self._last = step
        else:
            self.measured_all = False
