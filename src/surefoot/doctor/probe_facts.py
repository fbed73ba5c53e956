"""The facts of a probe, in the format of a watched run, and the findings of the rules.

A pass over a copy of the model is recorded like a sampled step of `surefoot run`. The rules of `diagnose` then judge it
like the first steps of a run, so that a cause is recognised in one place. A check presents the finding.

The checks themselves cover what no run shows: the effect of a changed batch, of changed weights or of another learning
rate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from surefoot.diagnose.engine import claims_of
from surefoot.record.facts import BackwardCall, CrashFacts, RunFacts, SampledStep, StepSeries
from surefoot.watch.call_facts import CallFacts
from surefoot.watch.crash import describe_crash
from surefoot.watch.deferred import read
from surefoot.watch.function_recorder import FunctionRecorder
from surefoot.watch.loss_graph import sign

if TYPE_CHECKING:
    from torch import Tensor

    from surefoot.core.operations import RunningModules
    from surefoot.diagnose.findings import Finding
    from surefoot.doctor.model_copy import PassTrace


JUDGED = frozenset(
    (
        "loss.softmax-before-cross-entropy",
        "loss.sigmoid-before-bce-logits",
        "loss.logits-into-probability-loss",
        "loss.bounded-output",
        "loss.broadcast",
        "loss.sign-flipped",
        "loss.no-valid-targets",
        "data.label-out-of-range",
        "data.token-mismatch",
        "mask.fully-masked-row",
        "model.batchnorm-tiny-batch",
        "memory.graph-retained",
    )
)
"""Causes that are visible in a single pass. The rules for others need several steps."""

REHEARSED = JUDGED | {
    "loss.undefined-op",
    "loss.sum-reduction",
    "mask.leaks-future",
    "optim.parameters-missing",
    "optim.frozen-parameters",
    "optim.detached-graph",
    "optim.no-update",
    "optim.stale-state",
    "model.unregistered-parameters",
    "model.dead-units",
    "model.saturated-units",
    "model.vanishing-gradient",
    "model.exploding-gradient",
    "init.too-large",
    "init.too-small",
    "init.symmetric",
    "lr.too-high",
    "lr.too-low",
    "lr.no-warmup",
    "clip.saturated",
    "precision.low-precision-weights",
    "data.nonfinite-input",
    "data.unscaled-input",
    "data.unshuffled",
    "data.repeated-batches",
    "data.bad-batch",
    "data.leakage",
    "data.split-mismatch",
    "data.labels-uninformative",
}
"""Causes that are visible in the rehearsal, in its data, or in a probe. Others need a longer run."""


class ProbeRecorder:
    """Records the calls of one pass while it is entered."""

    def __init__(self, running: RunningModules) -> None:
        self._running = running
        self._recorder = FunctionRecorder(self._take, _call)
        self._calls = CallFacts(0, lambda tensor: None, self._recorder)
        self._stack = ExitStack()

    def __enter__(self) -> ProbeRecorder:
        self._stack.enter_context(self._recorder)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _take(self, entry: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, tensors: list[Tensor]) -> None:
        entry.module = self._running.innermost
        self._calls.take(entry, args, kwargs, out)

    def step(self, loss: Tensor | None) -> SampledStep:
        """The recorded pass as a sampled step, and the origin of its loss; the tensors are released."""
        entry = None if loss is None else self._recorder.maker(loss)
        backward = [] if loss is None or entry is None else [self._backward_of(float(loss.detach()), entry)]
        self._recorder.forget()
        return read(SampledStep(step=0, calls=self._calls.as_facts(), backward_calls=backward))

    def _backward_of(self, loss: float, entry: int) -> BackwardCall:
        """The backward call that would have been made for the loss."""
        found = sign(self._recorder, entry)
        return BackwardCall(
            site="" if found is None else found.site,
            value=loss,
            backward=1,
            step=0,
            optimizers=[],
            nodes=0,
            operations=[],
            custom=[],
            parameters=[],
            entry=entry,
            made_from=[],
            sign=found,
        )


def _call(_: str, function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def facts_of(passes: Sequence[PassTrace]) -> RunFacts:
    """The facts of a run whose steps are these passes; one that raised ends it, like a crash."""
    error = next((each.error for each in passes if each.error is not None), None)
    finished = [each for each in passes if each.loss is not None]
    return RunFacts(
        steps=len(passes),
        backwards=len(finished),
        sampled_steps=[each.facts for each in passes if each.facts is not None],
        backward_series=StepSeries(step=list(range(len(finished))), loss=[each.value for each in finished]),
        crash=None if error is None else crash_facts(error),
    )


def crash_facts(error: Exception) -> CrashFacts:
    """An error that a pass raised."""
    found = describe_crash(error)
    return found if found.site is not None else replace(found, site="the loss")


def judge(passes: Sequence[PassTrace]) -> dict[str, Finding]:
    """The findings of the rules for some passes, by the code of the cause."""
    return claims_of(facts_of(passes), JUDGED)
