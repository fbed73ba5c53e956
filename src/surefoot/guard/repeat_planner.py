"""Which steps a return repeats, and whether the trouble has come back among them (`decide/repeat.py`)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from surefoot.decide.repeat import RepeatState, first_outlier, give_up, observe, plan

if TYPE_CHECKING:
    from collections.abc import Iterable

    from surefoot.decide.recovery import TrainingRecovery
    from surefoot.types import Decision, StepRecord


class RepeatPlanner:
    """Plans the repeats of one run."""

    def __init__(self, recovery: TrainingRecovery | None) -> None:
        self._recovery = recovery
        self.state = RepeatState() if recovery is not None and recovery.repeat else None
        """Where repeats stand; `None` if a return repeats no steps."""

    def advise(self, step: int, unhealthy: bool, advice: Decision) -> Decision:
        """A return at once if the trouble has come back among the repeated steps; else what is advised."""
        if self.state is None or self._recovery is None:
            return advice
        self.state, comes_back = observe(self.state, step, unhealthy, self._recovery.calm_steps)
        if not comes_back or advice.action != "none":
            return advice
        reason = f"the trouble of step {self.state.onset} came back when the steps were repeated"
        before = self.state.onset - self._recovery.margin_steps
        return replace(advice, action="roll_back", reason=reason, before=before, only_repeat=True)

    def plan(
        self, decision: Decision, step: int, reached: int, oldest: int, records: Iterable[StepRecord]
    ) -> RepeatState | None:
        """How to repeat the steps that a return would undo; `None` if it is to be one to earlier weights.

        The return was decided about `step`, and `reached` steps were taken. `oldest` is the first step that could be
        repeated, and `records` are those of the last steps.
        """
        if self.state is None or self._recovery is None or decision.before is None:
            return None
        onset = decision.before + self._recovery.margin_steps
        suspect = first_outlier(records, oldest, onset)
        return plan(self.state, onset, step, reached, self._recovery.attempts, suspect)

    def give_up(self) -> None:
        """The steps of the trouble under way cannot be repeated once more."""
        if self.state is not None:
            self.state = give_up(self.state)
