"""Step 3: can the model memorise a few rows? If not, neither data size nor regularisation is the reason.

The user's optimizer is tried first, then Adam at two rates: if none of the three succeeds, the learning rate is not the
reason. Dropout is off, so that the loss can reach its minimum.

A falling loss is not sufficient: it also falls in a model that ignores its inputs and learns the frequency of each
label. If the best such loss can be computed, the loss must get below it. It is not known for losses with weights, for
sums, and for losses whose best constant prediction has no formula. Nothing more is required of a model with too few
weights to memorise the rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from surefoot.doctor.batches import row_count
from surefoot.doctor.checks import Check, Status, failed, skipped
from surefoot.doctor.context import TINY_ROWS, CheckContext
from surefoot.doctor.function_calls import CLASSES, LossInput

if TYPE_CHECKING:
    from surefoot.doctor.model_copy import ModelCopy

STEP = 3
_NAME = "tiny batch"
_STEPS = 200
_SHARE = 0.08
"""The share of the time budget for one attempt."""
_LEARNT, _HARDLY, _UNMOVED = 0.5, 0.9, 0.98
"""The share of the first loss that may remain: to pass, to warn, and to count as falling at all."""
_NEAR = 0.02
"""A loss this close to that of a constant prediction counts as equal to it."""
_GONE = 0.02
"""When this share of the loss remains, training stops."""


@dataclass(frozen=True)
class _Goal:
    """What is known about the loss of the tiny batch before training."""

    floor: float
    """The smallest possible loss; 0 for an unknown loss function."""
    constant: float | None
    """The loss of the best constant prediction; `None` if unknown, or if all targets are equal."""
    known: bool
    """Whether the loss is a single known loss function."""
    can_fit: bool
    """Whether the model has many more weights than the tiny batch has targets."""

    def left(self, first: float, last: float) -> float:
        """The remaining share of the loss above its minimum."""
        if not math.isfinite(last) or not math.isfinite(first):
            return math.inf
        if first - self.floor <= 1e-6 * max(1.0, abs(first)):
            return 0.0 if last <= first else math.inf
        return (last - self.floor) / (first - self.floor)

    @property
    def expected(self) -> str:
        """The expected behaviour of the loss."""
        if self.only_below_constant:
            return f"a loss below {self.constant:.4g}, the loss of a prediction that ignores the inputs"
        return f"less than {_LEARNT:.0%} of the first loss is left"

    @property
    def only_below_constant(self) -> bool:
        """Whether the model is only required to be better than a constant prediction."""
        return self.constant is not None and not self.can_fit

    def is_reached(self, first: float, last: float) -> bool:
        """Whether the rows are learnt, as far as the model can learn them."""
        below_constant = self.constant is None or self._share_of_constant(last) < 1 - _NEAR
        return below_constant and (self.only_below_constant or self.left(first, last) <= _LEARNT)

    def is_at_constant(self, last: float) -> bool:
        """Whether the loss has stopped at that of a constant prediction."""
        return self.constant is not None and abs(self._share_of_constant(last) - 1) <= _NEAR

    def _share_of_constant(self, last: float) -> float:
        assert self.constant is not None
        return (last - self.floor) / (self.constant - self.floor)


@dataclass(frozen=True)
class _Attempt:
    """How far one optimizer lowered the loss of the tiny batch."""

    optimizer: str
    first: float
    last: float
    steps: int
    error: str | None = None
    """The error that ended it, if any."""


def check_overfit(context: CheckContext) -> list[Check]:
    """Train copies on a few rows until the loss is near its minimum."""
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
            fix = "Make two consecutive steps run. The usual reason is a graph kept from the first step."
            unknown = failed(STEP, _NAME, why, None, "two consecutive steps", fix)
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
        summary = f"inconclusive: {summary}"
    elif goal.is_at_constant(best.last):
        summary += f"; a prediction that ignores the inputs reaches {goal.constant:.4g}"
    context.measured(overfits=overfits, tiny_batch_left=left)
    if status == "skipped":
        return skipped(STEP, _NAME, summary)
    fix = "" if status == "pass" else _fix(context, goal, best)
    number = best.last if goal.only_below_constant else left
    return Check(STEP, _NAME, status, summary, number, goal.expected, fix)


def _conclude(goal: _Goal, best: _Attempt, left: float) -> tuple[bool | None, Status]:
    """Whether the batch was learnt, if that can be decided, and the fix."""
    fits = goal.known and goal.can_fit
    if goal.is_reached(best.first, best.last):
        return True, "pass"
    if goal.is_at_constant(best.last):
        return False, "fail" if fits else "warn"
    if left <= _LEARNT or (not fits and left < _UNMOVED):
        return None, "skipped"  # it falls, but it is not known whether because of the inputs
    if left <= _HARDLY or not fits:  # a loss of unknown kind need not measure progress
        return False, "warn"
    return False, "fail"


def _fix(context: CheckContext, goal: _Goal, best: _Attempt) -> str:
    causes = [check.cause for check in context.checks if check.cause is not None and check.status == "fail"]
    if causes:
        return f"Fix {causes[0]} first: it explains this failure."
    if goal.is_at_constant(best.last):
        return "Print the model's output for two different rows. If it is the same, find where the input is lost."
    return "Check the input of the loss and the gradients below: a model that cannot memorise 8 rows is disconnected."


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
    """Train on the batch until its loss is near its minimum. The last loss is the mean of the last few."""
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


def lowest_loss(call: LossInput) -> float:
    """The smallest value of the loss: 0, or the entropy of soft targets and of label smoothing."""
    smoothing = float(call.settings.get("label_smoothing", 0.0) or 0.0)
    targets = call.target.double()
    if call.kind == "cross_entropy" and smoothing > 0.0:
        other, count = smoothing / call.class_count, call.class_count
        hit = 1.0 - smoothing + other
        return -hit * math.log(hit) - (count - 1) * other * math.log(other)
    if call.kind.startswith("binary_cross_entropy") and call.settings.get("weight") is None:
        return float(_binary_entropy(targets).mean()) if targets.numel() else 0.0
    if call.kind == "cross_entropy" and call.target.is_floating_point():
        return float(_entropy(targets, call.class_dim).mean())
    return 0.0


def constant_answer_loss(call: LossInput) -> float | None:
    """The lowest mean loss of a prediction that is the same for every row; `None` if it is not known.

    Classes are counted over all targets of the batch, also if a row has several, so the result is never below the
    optimum.
    """
    if call.settings.get("reduction", "mean") != "mean" or not call.target.numel():
        return None
    if call.settings.get("weight") is not None or call.settings.get("pos_weight") is not None:
        return None
    if call.kind in CLASSES:
        return _of_classes(call)
    if call.input.shape != call.target.shape or not call.target.dim():
        return None
    target = call.target.double()
    if call.kind.startswith("binary_cross_entropy"):
        return float(_binary_entropy(target.mean(0)).mean())
    if call.kind == "mse_loss":
        return float((target - target.mean(0)).square().mean())
    if call.kind == "l1_loss":
        return float((target - target.median(0).values).abs().mean())
    return None


def _of_classes(call: LossInput) -> float | None:
    if call.has_indices:
        labels = call.target[call.valid]
        if not labels.numel() or int(labels.min()) < 0 or int(labels.max()) >= call.class_count:
            return None
        shares = torch.bincount(labels, minlength=call.class_count).double() / labels.numel()
    else:
        rows = call.target.double().movedim(call.class_dim, -1)
        shares = rows.reshape(-1, call.class_count).mean(0)
    smoothing = float(call.settings.get("label_smoothing", 0.0) or 0.0)
    return float(_entropy((1 - smoothing) * shares + smoothing / call.class_count, 0))


def _entropy(shares: Tensor, dim: int) -> Tensor:
    shares = shares.clamp_min(0)  # targets that are not probabilities are left to another check
    entropy: Tensor = -torch.special.xlogy(shares, shares).sum(dim)
    return entropy


def _binary_entropy(shares: Tensor) -> Tensor:
    shares = shares.clamp(0, 1)
    entropy: Tensor = -torch.special.xlogy(shares, shares) - torch.special.xlogy(1 - shares, 1 - shares)
    return entropy
