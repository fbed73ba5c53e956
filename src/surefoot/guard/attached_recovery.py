"""Recovery for an attached guard: earlier weights are kept in memory and restored inside `optimizer.step()`.

It works like `TrainingStabilizer(recovery=...)`, but without checkpoints: those belong to the owner of the loop. The
schedule, the counters and the data position continue: only weights, buffers and optimizer state return.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from surefoot.guard.persistence import EarlierWeights
from surefoot.guard.run_actions import RunActions
from surefoot.keep.snapshots import TrainedState

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import nn

    from surefoot.decide.raised_rate import StepRates
    from surefoot.decide.recovery import TrainingRecovery
    from surefoot.guard.context import GuardContext
    from surefoot.guard.step_results import Respond, StepResults
    from surefoot.types import Decision, StepRecord


class AttachedRecovery:
    """The earlier states of one attached optimizer. Keeps neither models nor optimizer alive."""

    def __init__(
        self, models: Sequence[nn.Module], optimizer: Any, guard: GuardContext, recovery: TrainingRecovery
    ) -> None:
        trained = TrainedState(models, optimizer, guard.policy.live_states, guard.policy.put_back)
        self.weights = EarlierWeights(None, trained, None, recovery, guard.ranks, guard.history.budgets.rates)
        self._history, self._repeats = guard.history, recovery.repeat
        self._actions = RunActions(guard.guarded.measurer, guard.history, self, None, guard.ranks, guard.policy)

    def before_update(self, step: int, rates: StepRates | None) -> None:
        """Called before the optimizer writes with these learning rates: complete a copy that is in progress."""
        self.weights.notice_rates(step, rates, self._history.onset)
        if self.weights.ring is not None:
            self.weights.ring.before_update()

    def after_step(self, step: int) -> None:
        """`step` optimizer steps are done: take a snapshot if one is due."""
        self.weights.after_step(step, self._history.onset)
        self.weights.report_jump(step, self._history)

    def return_to(self, before: int, tried: int, keep_present: bool) -> str | None:
        """Restore earlier weights; returns which ones, or `None` if there are none."""
        return self.weights.return_to(before, tried, keep_present)

    def repeat_from(self, results: StepResults, record: StepRecord, decision: Decision) -> str | None:
        """Repeats no steps: the loop and its data belong to the caller."""
        if self._repeats:
            why_not = "`attach` does not control the data of the loop"
            summary = f"a return restores earlier weights and does not repeat steps: {why_not}"
            self._history.warn_once(record.signals, "recovery.not-repeated", summary)
        return None

    def save_evidence(self, step: int, reason: str) -> Path | None:
        """Saves nothing: there are no checkpoints."""
        return None

    def respond(self, results: StepResults, record: StepRecord, decision: Decision) -> None:
        """Carry out the decision about a step. Raises `TrainingHalted` when every attempt to continue is used up."""
        self._actions.respond(results, record, decision)


def recovering(recovery: AttachedRecovery, otherwise: Respond) -> Respond:
    """Respond through the recovery as long as it exists, that is, while the optimizer is attached."""
    reference = weakref.ref(recovery)

    def respond(results: StepResults, record: StepRecord, decision: Decision) -> None:
        alive = reference()
        (otherwise if alive is None else alive.respond)(results, record, decision)

    return respond
