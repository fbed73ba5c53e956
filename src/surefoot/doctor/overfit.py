"""Step 3: can a handful of rows be learnt by heart? If not, nothing about data size or regularisation is the reason.

The user's own optimizer tries first, then Adam at two rates: what none of the three can do is not a matter of the
learning rate. Dropout is off, so that the loss can reach its floor.

A loss that falls is not enough: it also falls in a model that ignores its inputs and learns how frequent each label is.
Where the best such answer can be calculated, the loss has to get below it. No more than that is asked of a model with
too few weights to learn the rows by heart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from surefoot.doctor.batches import row_count
from surefoot.doctor.checks import Check, failed, skipped
from surefoot.doctor.context import TINY_ROWS, CheckContext
from surefoot.doctor.loss_bounds import constant_answer_loss, lowest_loss

if TYPE_CHECKING:
    from surefoot.doctor.checks import Status
    from surefoot.doctor.model_copy import ModelCopy

STEP = 3
_NAME = "tiny batch"
_STEPS = 200
_SHARE = 0.08
"""Part of the time budget that one attempt may take."""
_LEARNT, _HARDLY, _UNMOVED = 0.5, 0.9, 0.98
"""Share of the first loss that may be left: for a pass, for a warning, and for saying that it goes down at all."""
_NEAR = 0.02
"""How near to the loss of an answer without inputs a loss counts as equal to it."""
_GONE = 0.02
"""Share of the loss from which on nothing more needs to be learnt."""


@dataclass(frozen=True)
class _Goal:
    """What is known about the loss of the tiny batch before any step."""

    floor: float
    """The smallest value that the loss can take; 0 for a loss of unknown kind."""
    constant: float | None
    """The loss of the best answer that ignores the inputs; `None` if unknown, or if all targets are equal."""
    known: bool
    """Whether the loss is a single loss function of a known kind."""
    can_fit: bool
    """Whether the model has many more weights than the tiny batch has targets."""

    def left(self, first: float, last: float) -> float:
        """Which share of the loss above its floor is left."""
        if not math.isfinite(last) or not math.isfinite(first):
            return math.inf
        if first - self.floor <= 1e-6 * max(1.0, abs(first)):
            return 0.0 if last <= first else math.inf
        return (last - self.floor) / (first - self.floor)

    @property
    def expected(self) -> str:
        """What the loss should do."""
        if self.only_below_constant:
            return f"a loss below {self.constant:.4g}, that of an answer that ignores the inputs"
        return f"less than {_LEARNT:.0%} of the first loss is left"

    @property
    def only_below_constant(self) -> bool:
        """Whether no more can be asked of the model than to be better than an answer without inputs."""
        return self.constant is not None and not self.can_fit

    def is_reached(self, first: float, last: float) -> bool:
        """Whether the rows are learnt, as far as the model can learn them."""
        below_constant = self.constant is None or self._share_of_constant(last) < 1 - _NEAR
        return below_constant and (self.only_below_constant or self.left(first, last) <= _LEARNT)

    def is_at_constant(self, last: float) -> bool:
        """Whether the loss has come to rest where an answer without inputs does."""
        return self.constant is not None and abs(self._share_of_constant(last) - 1) <= _NEAR

    def _share_of_constant(self, last: float) -> float:
        assert self.constant is not None
        return (last - self.floor) / (self.constant - self.floor)


@dataclass(frozen=True)
class _Attempt:
    """How far one optimizer brought the loss of the tiny batch."""

    optimizer: str
    first: float
    last: float
    steps: int
    error: str | None = None
    """What ended it, if something did."""


def check_overfit(context: CheckContext) -> list[Check]:
    """Train copies on a few rows until the loss is gone."""
    batch = context.batch(rows=TINY_ROWS)
    if context.look is not None and not math.isfinite(context.look.value):
        return [skipped(STEP, _NAME, "the first loss is not finite, see step 2")]
    goal = _goal(context, batch)
    best: _Attempt | None = None
    for name, trial in _attempts(context):
        attempt = _train(context, name, trial, batch, goal)
        if attempt.error is not None:
            context.measured(overfits=False)
            why = f"a second step cannot be taken: {attempt.error}"
            fix = "Make two steps in a row run; a graph kept from the first step is the usual reason."
            unknown = failed(STEP, _NAME, why, None, "two steps in a row", fix)
            return [context.judged(("memory.graph-retained",), unknown)]
        if best is None or goal.left(attempt.first, attempt.last) < goal.left(best.first, best.last):
            best = attempt
        if goal.is_reached(attempt.first, attempt.last):
            break
    if best is None:
        return [skipped(STEP, _NAME, "nothing requires a gradient, so nothing can be trained")]
    return [_judge(context, goal, best, row_count(batch))]


def _judge(context: CheckContext, goal: _Goal, best: _Attempt, rows: int | None) -> Check:
    size = f"{rows} rows" if rows is not None else "one batch"
    summary = f"the loss goes from {best.first:.4g} to {best.last:.4g} on {size} in {best.steps} steps with "
    summary += best.optimizer
    left = goal.left(best.first, best.last)
    overfits, status = _conclude(goal, best, left)
    if best.steps < 50 and not overfits:
        overfits, status = None, "skipped"
        summary = f"the time budget allowed only {best.steps} steps; {summary}"
    elif status == "skipped":
        summary = f"nothing follows from this: {summary}"
    elif goal.is_at_constant(best.last):
        summary += f"; an answer that ignores the inputs reaches {goal.constant:.4g}"
    context.measured(overfits=overfits, tiny_batch_left=left)
    if status == "skipped":
        return skipped(STEP, _NAME, summary)
    fix = "" if status == "pass" else _fix(context, goal, best)
    number = best.last if goal.only_below_constant else left
    return Check(STEP, _NAME, status, summary, number, goal.expected, fix)


def _conclude(goal: _Goal, best: _Attempt, left: float) -> tuple[bool | None, Status]:
    """Whether the batch was learnt, if that can be told, and what the check says."""
    fits = goal.known and goal.can_fit
    if goal.is_reached(best.first, best.last):
        return True, "pass"
    if goal.is_at_constant(best.last):
        return False, "fail" if fits else "warn"
    if left <= _LEARNT or (not fits and left < _UNMOVED):
        return None, "skipped"  # it falls, but it is not known whether the inputs have anything to do with it
    if left <= _HARDLY or not fits:  # a loss of unknown kind need not measure progress
        return False, "warn"
    return False, "fail"


def _fix(context: CheckContext, goal: _Goal, best: _Attempt) -> str:
    causes = [check.cause for check in context.checks if check.cause is not None and check.status == "fail"]
    if causes:
        return f"Cure {causes[0]} first: it explains this."
    if goal.is_at_constant(best.last):
        return "Print the model's output for two different rows: if it is the same, look for where the input gets lost."
    return "Look at what reaches the loss and at the gradients below: what cannot learn 8 rows by heart is cut off."


def _attempts(context: CheckContext) -> Any:
    if context.optimizer is not None:
        trial = context.trial().without_dropout()
        trial.scale_rates(1.0)
        yield "your optimizer", trial
    for rate in (1e-3, 1e-2):
        trial = context.trial(own_optimizer=False).without_dropout()
        trainable = trial.parameters
        if not trainable:
            return
        trial.optimizer = torch.optim.Adam(trainable, lr=rate)
        yield f"Adam at {rate:g}", trial


def _train(context: CheckContext, name: str, trial: ModelCopy, batch: Any, goal: _Goal) -> _Attempt:
    """Train on the batch until its loss is gone; the last loss is the mean of the last few."""
    losses: list[float] = []
    for _ in context.steps(_STEPS, _SHARE):
        try:
            losses.append(trial.step(batch))
        except Exception as error:
            if losses:
                what = (str(error).splitlines() or [""])[0][:160]
                return _Attempt(name, losses[0], losses[-1], len(losses), what)
            raise
        start = losses[0] if goal.constant is None else min(losses[0], goal.constant)
        if not math.isfinite(losses[-1]) or goal.left(start, losses[-1]) < _GONE:
            break
    tail = losses[-3:] if len(losses) > 6 else losses[-1:]
    return _Attempt(name, losses[0], sum(tail) / len(tail), len(losses))


def _goal(context: CheckContext, batch: Any) -> _Goal:
    look = context.trial().without_dropout().look(batch)
    losses = look.recorded.losses
    value = losses[0].value if len(losses) == 1 else None
    if value is None or value.numel() != 1 or not math.isclose(look.value, float(value), rel_tol=1e-4):
        return _Goal(0.0, None, False, False)
    (call,) = losses
    floor, constant = lowest_loss(call), constant_answer_loss(call)
    if constant is not None and constant - floor <= 1e-6 * max(1.0, abs(constant)):
        constant = None  # all targets are equal
    trainable = sum(parameter.numel() for parameter in context.model.parameters() if parameter.requires_grad)
    return _Goal(floor, constant, True, trainable >= 10 * call.target.numel())
