"""Follows the learning rate: a raise far above all rates before is a fact that explains damage that follows.

The rate of a step is known before the step. If it is raised far above that of all steps before and of the schedule, the
weights from then on are in doubt, until the losses of the next `IN_DOUBT_STEPS` steps show that they are good: a return
goes to weights from before the raise and needs less patience. A raise alone changes nothing: a user may intend it.

While the rate is still raised after such a return, it would damage the restored weights again, so it is limited to the
last rate before the raise. The limit ends when the rate itself has come down. If it does not, the limit is lifted step
by step while the run is healthy, like the cuts of `TrainingRecovery`. If the return was undone, because the data has
changed and not the model, the raised rate is an ordinary one from then on.

The state is a few numbers; `RateWatch` holds that of one run. A rate that a hook of the optimizer sets during the step
is not known before it, and is not followed.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from surefoot.decide.recovery import TrainingRecovery

RAISED_RATE = 3.0
"""The factor above all earlier learning rates from which a rate may have damaged the weights."""
KNOWN_AFTER_STEPS = 32
"""The number of steps after which the earlier rates are known: before that, most rates are those of a warm-up."""
IN_DOUBT_STEPS = 64
"""The number of steps after a raise within which damage shows, also in the mean losses of `LostProgress`."""


class RateState(NamedTuple):
    """The rates so far. A rate of 0 is none."""

    seen: int = 0
    """The number of steps with a known rate, up to `KNOWN_AFTER_STEPS`."""
    highest: float = 0.0
    """The highest rate before a raise."""
    last: float = 0.0
    """The rate of the last step."""
    raised_at: int = -1
    """The first step at a raised rate, while the weights since are in doubt; -1 if they are not."""
    usual: float = 0.0
    """The rate of the step before that."""
    limit: float = 0.0
    """The highest rate that steps may use; 0 for no limit."""


class StepRates(NamedTuple):
    """The learning rates of one step."""

    rate: float
    """That of the first parameter group."""
    base: float
    """The rate that its schedule starts from; 0 if it is not known."""
    shares: tuple[float, ...]
    """The rates of all groups, divided by that of the first."""


class RateWatch:
    """The learning rates of one run, and the limit for a raised one."""

    def __init__(self, recovery: TrainingRecovery | None) -> None:
        self._recovery = recovery
        self._shares: tuple[float, ...] = ()
        self.state = RateState()

    def before_step(self, step: int, rates: StepRates | None) -> bool:
        """Note the rate of a step that is about to be taken. Returns whether it is the first one at a raised rate.

        A return to the rate that the schedule starts from, as of a restart, is no raise. Nor is one of a single
        parameter group: a limit would hold for all groups.
        """
        if rates is None:
            return False
        (rate, base, shares), known = rates, self._shares
        self._shares = shares
        if not 0 < rate < math.inf or step < self.state.raised_at:  # the last: the step is repeated
            return False
        before, self.state = self.state, self.state._replace(last=rate)
        if before.raised_at >= 0:
            if before.limit and step > before.raised_at and rate <= RAISED_RATE * before.usual:
                self.accept()
            return False
        is_common = len(known) != len(shares) or all(map(math.isclose, known, shares))
        if before.seen >= KNOWN_AFTER_STEPS and rate > RAISED_RATE * max(before.highest, base) and is_common:
            self.state = self.state._replace(raised_at=step, usual=before.last)
            return True
        seen = min(before.seen + 1, KNOWN_AFTER_STEPS)
        self.state = self.state._replace(seen=seen, highest=max(before.highest, rate))
        return False

    @property
    def raised_at(self) -> int | None:
        """The first step at a raised rate, if the weights since are in doubt."""
        return None if self.state.raised_at < 0 else self.state.raised_at

    @property
    def limit(self) -> float:
        """The highest rate that steps may use."""
        return self.state.limit or math.inf

    def returned(self) -> bool:
        """The run has returned to weights from before the raise. Returns whether the rate is limited from now on."""
        if self.state.raised_at < 0 or self._recovery is None or self._recovery.lr_factor == 1:
            return False
        self.state = self.state._replace(limit=self.state.usual)
        return True

    def after_step(self, step: int, is_healthy: bool, calm: int, has_attempts: bool) -> None:
        """The host has processed a step.

        Args:
            step: its number.
            is_healthy: whether there is no problem.
            calm: the number of consecutive healthy steps.
            has_attempts: whether a return is left, if a higher rate does damage again.
        """
        if self._recovery is None or self.state.raised_at < 0 or not is_healthy:
            return
        since, cut_steps = step - self.state.raised_at, self._recovery.cut_steps
        if not self.state.limit:
            if since >= IN_DOUBT_STEPS:
                self.accept()
        elif has_attempts and min(calm, since) >= cut_steps:
            # A higher limit is a raise, too: the weights up to here are good, and so is the present limit.
            limit = self.state.limit
            self.state = self.state._replace(raised_at=step + 1, usual=limit, limit=limit / self._recovery.lr_factor)
            if self.state.limit >= self.state.last:
                self.accept()

    def accept(self) -> None:
        """The raise is over, or the weights since are good: its rate is like any other from now on."""
        highest = max(self.state.highest, self.state.last)
        self.state = RateState(self.state.seen, highest, self.state.last)
