"""Step 3: can a handful of rows be learnt by heart? If not, nothing about data size or regularisation is the reason.

The user's own optimizer tries first, then Adam at two rates: what none of the three can do is not a matter of the
learning rate. Dropout is off, so that the loss can reach its floor.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from surefoot.doctor.batches import row_count
from surefoot.doctor.checks import Check, failed, passed, skipped, warned
from surefoot.doctor.context import TINY_ROWS, CheckContext

if TYPE_CHECKING:
    from surefoot.doctor.model_copy import ModelCopy, PassTrace

STEP = 3
_NAME = "tiny batch"
_STEPS = 200
_SHARE = 0.08
"""Part of the time budget that one attempt may take."""
_LEARNT, _HARDLY = 0.5, 0.9
"""Share of the first loss that may be left for a pass, and for a warning."""


def check_overfit(context: CheckContext) -> list[Check]:
    """Train copies on a few rows until the loss is gone."""
    batch = context.batch(rows=TINY_ROWS)
    rows = row_count(batch)
    size = f"{rows} rows" if rows is not None else "one batch"
    floor = _floor(context)
    best: tuple[float, str, int, float] | None = None
    if context.look is not None and not math.isfinite(context.look.value):
        return [skipped(STEP, _NAME, "the first loss is not finite, see step 2")]
    for name, trial in _attempts(context):
        first, last, steps, error = _train(context, trial, batch, floor)
        if error is not None:
            context.measured(overfits=False)
            why = f"a second step cannot be taken: {error}"
            fix = "Make two steps in a row run; a graph kept from the first step is the usual reason."
            unknown = failed(STEP, _NAME, why, None, "two steps in a row", fix)
            return [context.judged(("memory.graph-retained",), unknown)]
        left = _left(first, last, floor)
        if best is None or left < best[0]:
            best = (left, f"{first:.4g} to {last:.4g} on {size} in {steps} steps with {name}", steps, first)
        if left <= _LEARNT:
            break
    if best is None:
        return [skipped(STEP, _NAME, "nothing requires a gradient, so nothing can be trained")]
    return [_judge(context, best[0], best[1], best[2])]


def _judge(context: CheckContext, left: float, story: str, steps: int) -> Check:
    expected = f"less than {_LEARNT:.0%} of the first loss is left"
    summary = f"the loss goes from {story}"
    floor_known = _single_known_loss(context) is not None and _can_fit(context)
    overfits = left <= _LEARNT or (not floor_known and left < 0.98)
    too_short = steps < 50 and not overfits
    context.measured(overfits=None if too_short else overfits, tiny_batch_left=left)
    if overfits:
        return passed(STEP, _NAME, summary, left, expected)
    if too_short:
        return skipped(STEP, _NAME, f"the time budget allowed only {steps} steps; {summary}")
    fix = _fix(context)
    if left <= _HARDLY or not floor_known:  # a loss of unknown kind need not measure progress
        return warned(STEP, _NAME, summary, left, expected, fix)
    return failed(STEP, _NAME, summary, left, expected, fix)


def _fix(context: CheckContext) -> str:
    causes = [check.cause for check in context.checks if check.cause is not None and check.status == "fail"]
    if causes:
        return f"Cure {causes[0]} first: it explains this."
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


def _train(context: CheckContext, trial: ModelCopy, batch: Any, floor: float) -> tuple[float, float, int, str | None]:
    """First loss, the mean of the last few, the steps taken, and the error if one ended it."""
    losses: list[float] = []
    for _ in context.steps(_STEPS, _SHARE):
        try:
            losses.append(trial.step(batch))
        except Exception as error:
            if losses:
                return losses[0], losses[-1], len(losses), (str(error).splitlines() or [""])[0][:160]
            raise
        if not math.isfinite(losses[-1]) or _left(losses[0], losses[-1], floor) < 0.02:
            break
    tail = losses[-3:] if len(losses) > 6 else losses[-1:]
    return losses[0], sum(tail) / len(tail), len(losses), None


def _left(first: float, last: float, floor: float) -> float:
    if not math.isfinite(last) or not math.isfinite(first):
        return math.inf
    if first - floor <= 1e-6 * max(1.0, abs(first)):
        return 0.0 if last <= first else math.inf
    return (last - floor) / (first - floor)


def _single_known_loss(context: CheckContext) -> PassTrace | None:
    """The look, if the total loss is one loss function whose floor is known."""
    look = context.look
    if look is None or len(look.recorded.losses) != 1:
        return None
    value = look.recorded.losses[0].value
    known = value is not None and value.numel() == 1 and math.isclose(look.value, float(value), rel_tol=1e-4)
    return look if known else None


def _can_fit(context: CheckContext) -> bool:
    """Whether the model has many more weights than the tiny batch has targets."""
    trainable = sum(parameter.numel() for parameter in context.model.parameters() if parameter.requires_grad)
    look = context.look
    assert look is not None
    call = look.recorded.losses[0]
    rows = call.target.shape[0] if call.target.dim() else 1
    targets = call.target.numel() * min(1.0, TINY_ROWS / max(rows, 1))
    return trainable >= 10 * targets


def _floor(context: CheckContext) -> float:
    """The smallest value a known loss can take: 0, or the entropy that label smoothing adds."""
    look = _single_known_loss(context)
    if look is None:
        return 0.0
    call = look.recorded.losses[0]
    smoothing = float(call.settings.get("label_smoothing", 0.0) or 0.0)
    targets = call.target.float()
    if call.kind == "cross_entropy" and smoothing > 0.0:
        other, count = smoothing / call.class_count, call.class_count
        hit = 1.0 - smoothing + other
        return -hit * math.log(hit) - (count - 1) * other * math.log(other)
    if call.kind.startswith("binary_cross_entropy") and call.settings.get("weight") is None:
        soft = targets.clamp(1e-7, 1 - 1e-7)
        return float(-(soft * soft.log() + (1 - soft) * (1 - soft).log()).mean()) if targets.numel() else 0.0
    if call.kind == "cross_entropy" and call.target.is_floating_point():
        return float(-(targets * targets.clamp_min(1e-12).log()).sum(call.class_dim).mean())
    return 0.0
