"""Results of steps: read them when they arrive, update the run history, and respond.

On a GPU the numbers of a step arrive a fixed number of steps later, so that a run responds the same way every time.
Whether the step was applied was decided on the device; what remains is to log it, to restore buffers of a skipped step,
and to carry out the decision of the history (`Respond`): cut the learning rate, return to earlier weights, halt.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

import torch

from surefoot.core.state_tree import pack_record, unpack_record
from surefoot.core.weak_reference import InertWhenCopied, weak_references
from surefoot.errors import TrainingHalted
from surefoot.guard.step_decision import StepNumbers
from surefoot.keep.buffers import BufferKeeper, RunningStatistics
from surefoot.types import Signals

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, nn
    from torch.utils.hooks import RemovableHandle

    from surefoot.core.state_tree import PackedRecord
    from surefoot.guard.run_history import RunHistory, RunHistoryState
    from surefoot.types import Decision, StepRecord

    Respond: TypeAlias = "Callable[[StepResults, StepRecord, Decision], None]"


class _ResultsStateBase(TypedDict):
    steps: int
    lr_factor: float
    history: RunHistoryState
    stale_before: int
    """Steps before this one were taken on weights that the run has replaced since."""
    buffers: dict[str, list[Tensor | None]]
    """The buffers of the models before each of the last steps."""


class LiveStepResults(_ResultsStateBase):
    """The state of `StepResults`, including steps whose numbers may not have arrived yet."""

    pending: list[StepNumbers]


class StepResultsState(_ResultsStateBase):
    """The stored state of `StepResults`."""

    pending: list[PackedRecord]
    """Steps that the host has not processed."""


class StepResults:
    """The steps whose numbers have not been read yet, and the responses to those that have."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        history: RunHistory,
        lag_steps: int,
        *,
        respond: Respond,
        on_step: Callable[[StepRecord], None] | None = None,
        restore_after_overflow: bool = True,
    ) -> None:
        """Start to collect results. The models are not kept alive.

        Args:
            models: the modules whose buffers are restored after a skipped step; empty to restore none.
            history: processes every step and decides the response.
            lag_steps: the number of steps after which a step is read.
            respond: carries out the decision about a step that was skipped or requires an action; may raise
                `TrainingHalted`.
            on_step: called with every step once its numbers have arrived.
            restore_after_overflow: whether buffers are also restored after an fp16 overflow.
        """
        self._models = weak_references(models)
        self.history, self._lag_steps, self._respond, self._on_step = history, lag_steps, respond, on_step
        self._restore_after_overflow = restore_after_overflow
        self.steps = 0
        """Optimizer steps so far."""
        self.lr_factor = 1.0
        """The factor for the learning rates from now on."""
        self.stop_at: int | None = None
        """The step at which all ranks stop, once one of them was requested to."""
        self.pending: deque[StepNumbers] = deque()
        """The steps that have not been read yet, oldest first."""
        self._halted: TrainingHalted | None = None
        self._stale_before = 0
        self.buffers = BufferKeeper(self._models())
        self._statistics = RunningStatistics(models)
        after_load = _AfterLoad(self)
        self._handles = [
            module.register_load_state_dict_post_hook(after_load)  # type: ignore[no-untyped-call]
            for module in self.buffers.modules()
            if not isinstance(module, torch.jit.ScriptModule)  # does not accept such a hook
        ]
        weakref.finalize(self, _remove, self._handles).atexit = False

    def forget_models(self) -> None:
        """Stop restoring buffers: no step will follow."""
        _remove(self._handles)

    def take(self, numbers: StepNumbers) -> None:
        """A step has ended: read those that are due. Raises `TrainingHalted` when the budgets are used up."""
        self.steps += 1
        self.pending.append(numbers)
        halted, self._halted = self._halted, None
        if halted is not None:
            raise halted
        try:
            while len(self.pending) > self._lag_steps:
                self._account(self.pending.popleft())
        finally:
            if self._statistics.norms and (mended := self._statistics.check(self.steps)) is not None:
                self.history.note(Signals(self.steps - 1), "norm.broken-statistics", "warning", mended)
            if self.buffers.has_any:
                self.buffers.save(self.steps)

    def drain(self, *, is_end: bool = True) -> None:
        """Read every step now. Only for events that happen at the same step in every run: a save, a stop.

        Does not halt the run: the next step does, if necessary. Unless it `is_end`, the next step also shows whether a
        refused one was the first of a new level.
        """
        while self.pending:
            try:
                self._account(self.pending.popleft())
            except TrainingHalted as halted:
                self._halted = self._halted or halted
        if is_end:
            self.history.settle()

    def seen(self) -> RunHistory:
        """The history including every step, for reading. Waits for numbers that have not arrived.

        Reading changes nothing. The response to a step may change the learning rate or the weights; it happens
        `lag_steps` later, whether or not the step was read before.
        """
        pending = list(self.pending)
        return self.history.ahead(map(StepNumbers.record, pending), self._stale_before) if pending else self.history

    def report_rest(self) -> None:
        """Report the steps that have not been read yet, without responding to them: the log is about to close."""
        if self._on_step is not None:
            for numbers in self.pending:
                self._on_step(numbers.record())
        self.history.settle(next((each.record() for each in self.pending if self._counts(each.record())), None))
        self.history.ahead(map(StepNumbers.record, self.pending), self._stale_before, self.history.on_event).settle()

    def returned(self) -> None:
        """The run has returned to earlier weights: steps taken on the replaced ones are only counted."""
        self._stale_before = self.steps
        self.buffers = BufferKeeper(self._models())

    def _account(self, numbers: StepNumbers) -> None:
        record = numbers.record()
        if self._on_step is not None:
            self._on_step(record)
        step = record.signals.step
        if "stop" in record.notices and self.stop_at is None:
            self.stop_at = step + self._lag_steps + 1  # independent of when this rank reads it
        if not self._counts(record):
            self.history.count(record)
            self.buffers.settle(step)
            return
        if self.buffers.has_any:
            if record.skipped and (self._restore_after_overflow or not record.overflow):
                self.buffers.restore(step)
            self.buffers.settle(step)
        decision = self.history.account(record)
        if record.skipped or decision.action != "none":
            self._respond(self, record, decision)
        else:
            self.lr_factor = decision.lr_factor

    def _counts(self, record: StepRecord) -> bool:
        """Whether a step was taken at all, and on weights that the run has not replaced since."""
        return record.signals.step >= self._stale_before and "left_out" not in record.notices

    def state_dict(self) -> LiveStepResults:
        """The state, including steps whose numbers may not have arrived yet; `settled` waits for them."""
        return {
            "steps": self.steps,
            "lr_factor": self.lr_factor,
            "history": self.history.state_dict(),
            "stale_before": self._stale_before,
            "pending": list(self.pending),
            "buffers": self.buffers.state_dict(),
        }

    def load_state_dict(self, state: StepResultsState) -> None:
        """Continue from a saved state. Pending responses to later steps are dropped."""
        self._halted = self.stop_at = None
        self.steps, self.lr_factor = state["steps"], state["lr_factor"]
        self.history.load_state_dict(state["history"])
        self._stale_before = state["stale_before"]
        self.pending = deque(StepNumbers(unpack_record(packed)) for packed in state["pending"])
        self.buffers = BufferKeeper(self._models())
        self.buffers.load_state_dict(state["buffers"])


class _AfterLoad(InertWhenCopied):
    """Called when a state was loaded into a module."""

    def __init__(self, results: StepResults) -> None:
        self._results = weakref.ref(results)

    def __call__(self, module: nn.Module, incompatible: Any) -> None:
        results = self._results()
        if results is not None:
            results.buffers.loaded(module)


def _remove(handles: list[RemovableHandle]) -> None:
    while handles:
        handles.pop().remove()


def settled(state: LiveStepResults) -> StepResultsState:
    """A state of `StepResults` once the numbers of its last steps have arrived."""
    return {**state, "pending": [pack_record(numbers.record()) for numbers in state["pending"]]}


def call_each(*functions: Callable[[Any], None] | None) -> Callable[[Any], None] | None:
    """One function that calls all given ones; `None` if there are none."""
    given = [function for function in functions if function is not None]
    if len(given) < 2:
        return given[0] if given else None

    def call(value: Any) -> None:
        for function in given:
            function(value)

    return call
