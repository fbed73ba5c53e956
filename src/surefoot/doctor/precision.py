"""Step 8: the same pass without and with mixed precision (bf16 autocast), and whether the weights change at all."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from surefoot.doctor.checks import Check, passed, skipped, warned
from surefoot.doctor.wiring import backward

if TYPE_CHECKING:
    from surefoot.doctor.context import CheckContext
    from surefoot.doctor.model_copy import ModelCopy

STEP = 8
_LOSS_OFF, _DIRECTION = 0.1, 0.8
_HALF = (torch.float16, torch.bfloat16)


def check_precision(context: CheckContext) -> list[Check]:
    """Compare precisions, and look for weights whose updates are rounded away."""
    return [_autocast(context), _weights(context)]


def _autocast(context: CheckContext) -> Check:
    name, expected = "bf16 autocast", f"loss within {_LOSS_OFF:.0%}, gradient direction above {_DIRECTION:g}"
    plain, mixed = context.trial(), context.trial()
    if any(parameter.dtype in _HALF for parameter in plain.model.parameters()):
        return skipped(STEP, name, "the weights are in half precision themselves")
    torch.manual_seed(0)
    with torch.autocast(context.device.type, enabled=False):
        off = plain.look(context.batch())
        backward(off)
    torch.manual_seed(0)
    with torch.autocast(context.device.type, dtype=torch.bfloat16):
        on = mixed.look(context.batch())
    if on.error is not None or not math.isfinite(off.value):
        why = str(on.error).split("\n")[0] if on.error is not None else "the loss is not finite in float32 either"
        return skipped(STEP, name, f"autocast cannot be compared: {why}")
    backward(on)
    gap = abs(on.value - off.value) / max(abs(off.value), 1e-6)
    alike = _cosine(plain, mixed)
    summary = f"the loss changes by {gap:.2%}, and the gradients have a cosine of {alike:.4f}"
    if not math.isfinite(on.value) or (gap > _LOSS_OFF and abs(on.value - off.value) > 1e-3) or alike < _DIRECTION:
        fix = "Keep this model in float32, or the operation that differs: turn autocast off around it."
        return warned(STEP, name, summary, gap, expected, fix)
    return passed(STEP, name, summary, gap, expected)


def _cosine(one: ModelCopy, other: ModelCopy) -> float:
    dot = left = right = 0.0
    for a, b in zip(one.parameters, other.parameters, strict=True):
        if a.grad is not None and b.grad is not None:
            x, y = a.grad.to_dense().double().flatten(), b.grad.to_dense().double().flatten()
            dot, left, right = dot + float(x @ y), left + float(x @ x), right + float(y @ y)
    if not math.isfinite(right) or not math.isfinite(left):
        return math.nan if not math.isfinite(left) else -1.0
    return dot / math.sqrt(left * right) if left > 0.0 and right > 0.0 else 1.0


def _weights(context: CheckContext) -> Check:
    """The share of entries that did not change at the first step of the rehearsal."""
    name = "weights change"
    if context.optimizer is None:
        return skipped(STEP, name, "no optimizer was given")
    updates = [row for step in context.facts.sampled_steps[:1] for update in step.updates for row in update.rows]
    stuck = [row.stuck for row in updates if row.stuck is not None and row.grad]
    share = sum(stuck) / len(stuck) if stuck else 0.0
    summary = f"{share:.0%} of the entries of {len(stuck)} tensors with a gradient stay the same at the first step"
    sound = passed(STEP, name, summary, share, "most entries change")
    return context.judged(("precision.low-precision-weights", "optim.no-update"), sound)
