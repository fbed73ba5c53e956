"""Carries out decisions: cut the learning rate, return to earlier weights, halt, stop at a signal."""

from __future__ import annotations

import logging
import math
import signal
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn, Protocol

from surefoot.decide.raised_rate import RAISED_RATE
from surefoot.decide.recovery import was_bad_batch
from surefoot.errors import CheckpointError, TrainingHalted

if TYPE_CHECKING:
    from pathlib import Path

    from surefoot.decide.agreement import Ranks
    from surefoot.guard.guarded_optimizer import StepMeasurer
    from surefoot.guard.incident_capture import IncidentCapture
    from surefoot.guard.log_rows import LogRows
    from surefoot.guard.persistence import EarlierWeights, RunPersistence
    from surefoot.guard.run_history import RunHistory
    from surefoot.guard.step_decision import StepPolicy
    from surefoot.guard.step_results import StepResults
    from surefoot.types import Decision, StepRecord

log = logging.getLogger("surefoot")

BLOWN_UP = 1e6
"""The factor above the usual loss or gradient beyond which weights that the script itself wrote are damage: a layer
that is initialised again brings those of the first steps back."""


class KeptStates(Protocol):
    """The earlier states of a run."""

    @property
    def weights(self) -> EarlierWeights:
        """Snapshots in memory, and returns to them."""

    def return_to(self, before: int, tried: int, keep_present: bool) -> str | None:
        """Restore earlier weights; returns which ones, or `None` if there are none."""

    def repeat_from(self, results: StepResults, record: StepRecord, decision: Decision) -> str | None:
        """Return to an earlier moment and repeat the steps since; returns its description, `None` if impossible."""

    def save_evidence(self, step: int, reason: str) -> Path | None:
        """Save a run that is about to halt; returns the folder, or `None` if there is no checkpoint folder."""


class RunActions:
    """Carries out decisions for a run that has earlier states, and perhaps incidents."""

    def __init__(
        self,
        measurer: StepMeasurer,
        history: RunHistory,
        persistence: KeptStates,
        capture: IncidentCapture | None,
        ranks: Ranks,
        policy: StepPolicy,
    ) -> None:
        self._measurer, self._history, self._ranks, self._policy = measurer, history, ranks, policy
        self._persistence, self._capture = persistence, capture

    def respond(self, results: StepResults, record: StepRecord, decision: Decision) -> None:
        """Carry out the decision about a step. Raises `TrainingHalted` when every attempt to continue is used up."""
        if record.skipped and self._capture is not None:
            self._capture.refused(record, results.pending)
        weights, typical = self._persistence.weights, self._history.typical
        had_moved = decision.only_if_moved and (
            weights.weights_had_moved(typical, has_blown_up(self._history))
            or was_bad_batch(self._history.history, self._history.onset)
        )
        if decision.only_if_moved and not self._ranks.any(had_moved):
            if not self._repeat(results, record, replace(decision, is_test=True)):
                self._history.budgets.decline(decision)
            return
        if decision.action == "take_back" and self._ranks.any(
            has_raised_rate(self._history) and weights.moved_since_return(results.steps, typical)
        ):
            self._history.budgets.decline(decision)  # the rate damaged the weights again, so the data is not the cause
            return
        results.lr_factor = decision.lr_factor
        if decision.is_test:
            self._repeat(results, record, decision)
        elif decision.action in ("roll_back", "reset_moments", "take_back"):
            self._return(results, record, decision)
        elif decision.action == "halt":
            self._halt(results, decision.reason)

    def _return(self, results: StepResults, record: StepRecord, decision: Decision) -> None:
        """Return to earlier weights, or clear the optimizer's state, and record it."""
        if self._capture is not None:
            self._capture.returning(record, decision, results.steps)
        if decision.action == "roll_back" and self._repeat(results, record, decision):
            return
        if decision.only_repeat:
            self._history.budgets.repeats.give_up()
            return
        done = self._carried_out(record, decision)
        if done is None:
            self._nothing_to_return_to(results, record, decision)
            return
        results.returned()
        self._persistence.weights.returned(results.steps)
        self._measurer.param_norm = None  # the parameters have changed
        summary = f"{decision.reason}: {done}; {self._rate_from_now_on(decision)}"
        self._history.note(record.signals, "recovery", "warning", summary, decision.action)

    def _repeat(self, results: StepResults, record: StepRecord, decision: Decision) -> bool:
        """Return to an earlier moment and repeat the steps since, and record it; false if that is not possible."""
        repeated = self._persistence.repeat_from(results, record, decision)
        if repeated is None:
            return False
        results.returned()
        self._measurer.param_norm = None  # the parameters have changed
        summary = f"{decision.reason}: back to {repeated}"
        if decision.is_test:
            summary += " to see whether this recurs"
        elif decision.limits_rate:
            summary += f"; {self._rate_from_now_on(decision)}"
        self._history.note(record.signals, "recovery", "warning", summary, "repeat")
        return True

    def _rate_from_now_on(self, decision: Decision) -> str:
        """Limit the learning rate after a return, if it was raised before the problem. Returns a description."""
        rates = self._history.budgets.rates
        if decision.limits_rate and rates.returned():
            return f"learning rate at most {rates.limit:.4g}, as before it was raised at step {rates.raised_at}"
        return f"learning rate x {decision.lr_factor:g}"

    def _carried_out(self, record: StepRecord, decision: Decision) -> str | None:
        if decision.action == "reset_moments":
            self._persistence.weights.reset_moments()
            return "the optimizer's state is cleared"
        if decision.action == "take_back":
            if not self._persistence.weights.take_back():
                return None
            self._policy.restart_levels()
            self._history.budgets.rates.accept()
            return "the return is undone"
        assert decision.before is not None
        tried = self._history.budgets.returns_tried - 1
        where = self._persistence.return_to(decision.before, tried, keep_present=not record.skipped)
        return where and f"back to {where}"

    def _nothing_to_return_to(self, results: StepResults, record: StepRecord, decision: Decision) -> None:
        reason = f"{decision.reason}, and there is no earlier state to return to"
        if decision.action != "take_back" and self._weights_broken():
            self._halt(results, reason)
        self._history.warn_once(record.signals, "recovery.no-state", reason)

    def _weights_broken(self) -> bool:
        """Whether weights are not finite on any rank: all ranks must react in the same way."""
        return self._ranks.any(self._measurer.parameters_broken())

    def _halt(self, results: StepResults, reason: str) -> NoReturn:
        message = halt_message(self._history, reason, self._weights_broken())
        evidence = self._persistence.save_evidence(results.steps, reason)
        if evidence:
            message += f" The current state was saved to {evidence}."
        raise TrainingHalted(message, self._history.incidents[-1])


def has_raised_rate(history: RunHistory) -> bool:
    """Whether the learning rate since shortly before the current problem is far above that of all steps before."""
    onset, recovery = history.onset, history.budgets.recovery
    if onset is None or recovery is None:
        return False
    before, now = _before_and_since(history, "lr", onset - recovery.margin_steps)
    return max(now, default=0.0) > RAISED_RATE * max(before, default=0.0) > 0


def has_blown_up(history: RunHistory) -> bool:
    """Whether losses or gradients of the current problem are larger than after any change of weights that is meant."""
    if history.onset is None:
        return False
    for name in ("loss", "grad_norm"):
        before, now = _before_and_since(history, name, history.onset)
        usual = sorted(filter(math.isfinite, before))
        if usual and max(now, default=0.0) > BLOWN_UP * usual[len(usual) // 2] > 0:
            return True
    return False


def _before_and_since(history: RunHistory, name: str, step: int) -> tuple[list[float], list[float]]:
    """The sizes of a signal before a step, and from it on, as far as the history has them."""
    known = [(each.signals.step, getattr(each.signals, name)) for each in history.history]
    sizes = [(at, abs(float(value))) for at, value in known if value is not None]
    return [size for at, size in sizes if at < step], [size for at, size in sizes if at >= step]


def stop_if_asked(results: StepResults, persistence: RunPersistence, ranks: Ranks) -> None:
    """Save and exit if a signal was received. Ranks exit together, when they have learned of each other's signals."""
    received = persistence.data.interrupts.received
    agreed = results.stop_at is not None and results.steps >= results.stop_at
    if not (agreed if ranks.several else received is not None):
        return
    results.drain()
    try:
        persistence.saver.save(results.steps, results.history.instability(), results.history.recent_loss())
    except CheckpointError as error:  # the sender of the signal does not wait
        log.error("surefoot: %s", error)
    with suppress(RuntimeError):  # a rank that has ended cannot be waited for
        # The launcher may kill the other ranks when the first has ended, and they may still be writing.
        ranks.any(False)
    raise SystemExit(128 + (received or signal.SIGTERM))


def save_before(error: Exception, results: StepResults, persistence: RunPersistence, rows: LogRows | None) -> None:
    """Save the complete steps after a data loader has failed: its error ends the loop.

    Not done with several ranks, which save together: the others have not failed.
    """
    results.drain()
    checkpoints, step = persistence.checkpoints, results.steps
    saved = False
    if checkpoints is not None and checkpoints.world_size == 1 and step > 0:
        try:
            persistence.saver.save(step, results.history.instability(), results.history.recent_loss())
            saved = True
        except CheckpointError as failed:  # the reason why the loop ends is more important
            log.error("surefoot: %s", failed)
    if rows is not None:
        rows.loader_failed(error, step, saved)


def halt_message(history: RunHistory, reason: str, weights_broken: bool) -> str:
    """The message of `TrainingHalted`: the step, the reason, and the state of the weights."""
    weights = (
        "The weights are not finite: an earlier step with finite gradients damaged them."
        if weights_broken
        else "The weights are those of the last step that was applied."
    )
    return (
        f"halted at step {history.incidents[-1].step} after all recovery attempts: {reason}. {weights} "
        "See `.incident` on this error; to skip such steps indefinitely, use `escalation=None`."
    )
