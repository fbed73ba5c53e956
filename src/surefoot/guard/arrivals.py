"""After the step: take its numbers in when they arrive, do what they call for, save, stop.

On a GPU the numbers of a step arrive a few steps later. Whether the step was applied was settled on the device; here it
is a matter of budgets, of going back to earlier weights, of halting, and of holding on to the run.
"""

from __future__ import annotations

import logging
import signal
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

from surefoot.core.state_tree import pack_record, unpack_record
from surefoot.errors import CheckpointError, TrainingHalted
from surefoot.guard.step_numbers import StepNumbers
from surefoot.keep.buffers import BufferKeeper

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from surefoot.decide.agreement import Ranks
    from surefoot.guard.guarded_optimizer import GuardedOptimizer
    from surefoot.guard.incident_capture import IncidentCapture
    from surefoot.guard.persistence import RunPersistence
    from surefoot.guard.run_history import RunHistory
    from surefoot.types import Decision, StepRecord

log = logging.getLogger("surefoot")


class StepResults:
    """Steps whose numbers are on their way, and what is done about those that have arrived."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        guarded: GuardedOptimizer,
        ledger: RunHistory,
        lag_steps: int,
        ranks: Ranks,
    ) -> None:
        self._models, self._guarded, self.ledger, self._lag_steps = models, guarded, ledger, lag_steps
        self._ranks = ranks
        self.lifeline: RunPersistence  # set by the stabilizer, whose whole state it saves
        self.capture: IncidentCapture  # the same
        self.tell: Callable[[StepRecord], None] = lambda record: None
        """Who else wants to know of steps."""
        self.steps = 0
        """Optimizer steps so far."""
        self.lr_factor = 1.0
        """What the learning rates are multiplied by from here on."""
        self.buffers = BufferKeeper(models)
        self._pending: deque[StepNumbers] = deque()
        self._halted: TrainingHalted | None = None
        self._stale_before = 0
        self._stop_at: int | None = None

    def take(self, numbers: StepNumbers) -> None:
        """A step is done. Raises `TrainingHalted` when every attempt to go on is used up, `SystemExit` at a signal."""
        self.steps += 1
        self._pending.append(numbers)
        halted, self._halted = self._halted, None
        if halted is not None:
            raise halted
        try:
            while len(self._pending) > self._lag_steps:
                self._account(self._pending.popleft())
        finally:
            self.buffers.save(self.steps)
        self.lifeline.after_step(self.steps, self.ledger.healthy, self.ledger.unrest, self.ledger.recent_loss)
        if not self.lifeline.between_batches_soon:
            self.stop_if_asked()
        self.lifeline.step_over()

    def drain(self) -> None:
        """Take in every step now. Only for what happens at the same step in every run: a save, a stop.

        Does not halt the run: the next step does, if it comes to that.
        """
        while self._pending:
            try:
                self._account(self._pending.popleft())
            except TrainingHalted as halted:
                self._halted = self._halted or halted

    def seen(self) -> RunHistory:
        """The ledger with every step in it, for whoever wants to look. Waits for numbers still on their way.

        Looking changes nothing. Taking a step in may change the learning rate or the weights, and that happens
        `lag_steps` later, at the same step whether or not anybody looks.
        """
        pending = list(self._pending)
        return self.ledger.ahead(map(StepNumbers.record, pending), self._stale_before) if pending else self.ledger

    def tell_rest(self) -> None:
        """Tell of the steps whose turn has not come yet: nothing is told after this."""
        for numbers in self._pending:
            self.tell(numbers.record())
        self.ledger.ahead(map(StepNumbers.record, self._pending), self._stale_before, self.ledger.tell)

    def _account(self, numbers: StepNumbers) -> None:
        record = numbers.record()
        self.tell(record)
        step = record.signals.step
        if "stop" in record.notices and self._stop_at is None:
            self._stop_at = step + self._lag_steps + 1  # whenever this rank came to read of it
        if step < self._stale_before:  # taken on weights that the run has left since
            self.ledger.count(record)
            return
        if record.skipped:
            self.buffers.restore(step)
        self.buffers.settle(step)
        decision = self.ledger.account(record)
        if record.skipped:
            self.capture.refused(record, self._pending)
        if decision.only_if_moved and not self._ranks.any(
            self.lifeline.weights_had_moved(self.ledger.typical_gradient)
        ):
            self.ledger.decline_return()
            return
        self.lr_factor = decision.lr_factor
        if decision.action in ("roll_back", "reset_moments", "take_back"):
            self._go_back(record, decision)
        elif decision.action == "halt":
            self._halt(decision.reason)

    def _go_back(self, record: StepRecord, decision: Decision) -> None:
        """Carry out what the recovery calls for, and say what became of it."""
        self.capture.returning(record, decision, self.steps)
        done = self._carried_out(record, decision)
        if done is None:
            self._nowhere_to_return(record, decision)
            return
        self._stale_before = self.steps
        self._guarded.forget_norm()
        self.buffers = BufferKeeper(self._models)
        summary = f"{decision.reason}: {done}; learning rate x {decision.lr_factor:g}"
        self.ledger.note(record.signals, "recovery", "warning", summary, decision.action)

    def _carried_out(self, record: StepRecord, decision: Decision) -> str | None:
        if decision.action == "reset_moments":
            self.lifeline.reset_moments()
            return "the optimizer's state is cleared"
        if decision.action == "take_back":
            return "back to the state that was left" if self.lifeline.take_back() else None
        assert decision.before is not None
        tried = self.ledger.returns_tried - 1
        where = self.lifeline.return_to(decision.before, tried, keep_present=not record.skipped)
        return where and f"back to {where}"

    def _nowhere_to_return(self, record: StepRecord, decision: Decision) -> None:
        reason = f"{decision.reason}, and there is no earlier state to return to"
        if decision.action != "take_back" and self._weights_broken():
            self._halt(reason)
        self.ledger.warn_once(record.signals, "recovery.no-state", reason)

    def _weights_broken(self) -> bool:
        """Whether they are on any rank: what follows from it must be done on all."""
        return self._ranks.any(self._guarded.parameters_broken())

    def _halt(self, reason: str) -> NoReturn:
        incident = self.ledger.incidents[-1]
        weights = (
            "The weights themselves are not finite: an earlier step broke them with finite gradients."
            if self._weights_broken()
            else "The weights are those of the last step that was applied."
        )
        message = (
            f"halted at step {incident.step} after every attempt to go on: {reason}. {weights} "
            "See `.incident` on this error; `escalation=None` goes on skipping instead."
        )
        evidence = self.lifeline.save_evidence(self.steps, reason)
        if evidence:
            message += f" The state as it is was kept in {evidence}."
        raise TrainingHalted(message, incident)

    def stop_if_asked(self) -> None:
        """Save and leave if a signal came. Ranks leave together, once they know of each other's signals."""
        received = self.lifeline.interrupts.received
        agreed = self._stop_at is not None and self.steps >= self._stop_at
        if not (agreed if self._ranks.several else received is not None):
            return
        self.drain()
        try:
            self.lifeline.save(self.steps, self.ledger.unrest(), self.ledger.recent_loss())
        except CheckpointError as error:  # whoever sent the signal does not wait
            log.error("surefoot: %s", error)
        with suppress(RuntimeError):  # a rank that is gone cannot be waited for
            # Whoever started the ranks may kill the others once the first has left, and they may still be writing.
            self._ranks.any(False)
        raise SystemExit(128 + (received or signal.SIGTERM))

    def state_dict(self) -> dict[str, Any]:
        """The state, with steps whose numbers may still be on their way; `settled` waits for them."""
        return {
            "steps": self.steps,
            "lr_factor": self.lr_factor,
            "ledger": self.ledger.state_dict(),
            "stale_before": self._stale_before,
            "pending": list(self._pending),
            "buffers": self.buffers.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where a saved one stopped."""
        self.steps, self.lr_factor = state["steps"], state["lr_factor"]
        self.ledger.load_state_dict(state["ledger"])
        self._stale_before = state["stale_before"]
        self._pending = deque(StepNumbers(unpack_record(packed)) for packed in state["pending"])
        self.buffers = BufferKeeper(self._models)
        self.buffers.load_state_dict(state["buffers"])


def settled(state: dict[str, Any]) -> dict[str, Any]:
    """A state of `StepResults` once the numbers of its last steps have arrived."""
    return state | {"pending": [pack_record(numbers.record()) for numbers in state["pending"]]}
