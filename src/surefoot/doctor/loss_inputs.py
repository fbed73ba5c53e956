"""Step 2: does the loss get what it expects? Judged by the values that reach it, never by the names of layers.

Probabilities are recognised by summing to 1. A range is harder: untrained logits of a single output may all happen to
lie between 0 and 1. So the weights of a copy are shaken hard, several times; logits leave the interval, the output of a
sigmoid never does.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from surefoot.doctor.batches import leaves, map_leaves
from surefoot.doctor.checks import Check, from_catalogue, from_finding, passed
from surefoot.doctor.function_calls import POINTWISE, LossInput
from surefoot.doctor.probe_facts import judge

if TYPE_CHECKING:
    from collections.abc import Iterator

    from surefoot.diagnose.findings import Finding
    from surefoot.doctor.context import CheckContext
    from surefoot.doctor.model_copy import PassTrace

STEP = 2
_JUDGED = (
    "loss.softmax-before-cross-entropy",
    "loss.logits-into-probability-loss",
    "loss.sigmoid-before-bce-logits",
    "loss.bounded-output",
)
"""What the rules recognise in one pass."""
_EXPECTED = {
    "cross_entropy": "logits: any real numbers",
    "nll_loss": "log-probabilities: their exponentials sum to 1",
    "kl_div": "log-probabilities: their exponentials sum to 1",
    "binary_cross_entropy": "probabilities from 0 to 1",
    "binary_cross_entropy_with_logits": "logits: any real numbers",
}
_DRAWS = 8
_SHAKEN_ROWS = 16
_BEYOND = 0.01
"""Share of the targets that must lie beyond a bound before it is called one that they cross."""


def check_agreement(context: CheckContext) -> list[Check]:
    """Judge what reaches the loss."""
    look = context.look
    assert look is not None
    calls = look.recorded.losses
    checks = [_shape_check(context, look), _input_check(context, calls[-1] if calls else None)]
    if look.error is None:
        checks += [_finite(context, look), _sign(context, look)]
        causal = _causal(context)
        checks += [] if causal is None else [causal]
    return checks


def _shape_check(context: CheckContext, look: PassTrace) -> Check:
    name = "target shape"
    if "loss.broadcast" in context.claims:
        return from_finding(STEP, name, context.claims["loss.broadcast"], "equal shapes")
    if not look.recorded.losses:
        return passed(STEP, name, "no difference of prediction and target spreads over a larger shape")
    call = look.recorded.losses[-1]
    return passed(STEP, name, f"prediction {tuple(call.input.shape)} and target {tuple(call.target.shape)}")


def _input_check(context: CheckContext, call: LossInput | None) -> Check:
    name = "loss input"
    if call is None:
        return passed(STEP, name, "the loss is written by hand: nothing known to compare its input with")
    expected = _EXPECTED.get(call.kind, "targets within reach of the output")
    for cause in _JUDGED:
        if cause in context.claims:
            return from_finding(STEP, name, context.claims[cause], expected)
    if not call.input.numel() or not bool(call.input.isfinite().all()):
        return passed(
            STEP, name, f"what reaches {call.kind} is empty or not finite, and cannot be judged", None, expected
        )
    if call.kind == "binary_cross_entropy_with_logits":
        found = _shaken_into_unit(context, call)
        if found is not None:
            return from_finding(STEP, name, found, expected)
    bounded = _bounded(context, call)
    if bounded is not None:
        summary, number = bounded
        return from_catalogue(STEP, name, "fail", "loss.bounded-output", summary, number, expected)
    low, high = (float(bound) for bound in call.input.float().aminmax())
    return passed(STEP, name, f"values from {low:.3g} to {high:.3g} go into {call.kind}", high, expected)


def _shaken_into_unit(context: CheckContext, call: LossInput) -> Finding | None:
    """Whether logits between 0 and 1 stay there whatever the weights; single untrained outputs may lie there."""
    low, high = (float(bound) for bound in call.input.float().aminmax())
    if low < 0.0 or high > 1.0:
        return None
    assert context.look is not None
    return judge([context.look, *_shaken_passes(context)]).get("loss.sigmoid-before-bce-logits")


def _bounded(context: CheckContext, call: LossInput) -> tuple[str, float] | None:
    """Whether the output stays within bounds whatever the weights, and what is asked of it lies beyond."""
    if call.kind != "cross_entropy" and call.kind not in POINTWISE:
        return None
    low, high = _shaken_range(context, call)
    if call.kind == "cross_entropy":
        bounds = _bounds(low, high)
        summary = f"what reaches cross_entropy stays within {bounds} whatever the weights: no class can become certain"
        return None if bounds is None else (summary, high)
    targets = call.target.float()
    share = _share_beyond(targets, low, high)
    if share <= _BEYOND:
        return None
    summary = (
        f"the output stays within {low:.3g} to {high:.3g} whatever the weights, and {share:.0%} of the targets "
        f"({float(targets.min()):.3g} to {float(targets.max()):.3g}) lie beyond"
    )
    return summary, share


def _share_beyond(targets: Tensor, low: float, high: float) -> float:
    """Share of the targets beyond a bound that looks like one of an activation."""
    if not targets.numel():
        return 0.0
    margin = 1e-3 * max(1.0, abs(low), abs(high))
    bounded_below = low in (0.0, -1.0) or abs(low + 1.0) < 1e-2 or 0.0 <= low < 1e-2
    below = float((targets < low - margin).float().mean()) if bounded_below else 0.0
    above = float((targets > high + margin).float().mean()) if abs(high - 1.0) < 1e-2 else 0.0
    return below + above


def _bounds(low: float, high: float) -> str | None:
    """The interval that a bounded activation would give, if the range seen is one."""
    if low >= 0.0 and high <= 1.0:
        return "0 to 1"
    if low >= -1.0 and high <= 1.0 and high - low > 1.5:
        return "-1 to 1"
    return None


def _shaken_range(context: CheckContext, call: LossInput) -> tuple[float, float]:
    """Smallest and largest value that reaches the loss under weights that are changed by a large random amount."""
    low, high = math.inf, -math.inf
    for look in _shaken_passes(context):
        same = [seen.input.float() for seen in look.recorded.losses if seen.kind == call.kind]
        if same and same[-1].numel() and bool(same[-1].isfinite().all()):
            low, high = min(low, float(same[-1].min())), max(high, float(same[-1].max()))
    return (low, high) if low <= high else (-math.inf, math.inf)


def _shaken_passes(context: CheckContext) -> Iterator[PassTrace]:
    """Passes of a few rows under weights that are changed by a large random amount."""
    for draw in range(_DRAWS):
        trial = context.trial()
        torch.manual_seed(draw)
        with torch.no_grad():
            for parameter in trial.model.parameters():
                _shake(parameter)
        yield trial.look(context.batch(rows=_SHAKEN_ROWS))


def _shake(parameter: Tensor) -> None:
    if parameter.is_floating_point():
        scale = float(parameter.float().square().mean().sqrt()) if parameter.numel() else 0.0
        parameter.add_(torch.randn_like(parameter) * (5.0 * scale + 0.5 * (parameter.dim() < 2)))


def _finite(context: CheckContext, look: PassTrace) -> Check:
    name = "first loss"
    if math.isfinite(look.value):
        return passed(STEP, name, f"the first loss is {look.value:.4g}", look.value, "finite")
    again = context.trial().look(context.batch(), trace_nan=True)
    if "mask.fully-masked-row" in context.claims:
        return from_finding(STEP, name, context.claims["mask.fully-masked-row"], "finite")
    cause = "data.nonfinite-input" if _input_broken(context) else "loss.undefined-op"
    made = again.recorded.first_nan
    where = f"first made by `{made[0]}` in `{made[1] or 'the loss'}`" if made else "no single operation made a NaN"
    if look.first_nonfinite is not None:
        where += f"; the first module with such an output is `{look.first_nonfinite}`"
    summary = f"the first loss is {look.value} before any update: {where}"
    return from_catalogue(STEP, name, "fail", cause, summary, look.value, "finite")


def _input_broken(context: CheckContext) -> bool:
    return any(t.is_floating_point() and not bool(t.isfinite().all()) for _, t in leaves(context.batches[0]))


def _sign(context: CheckContext, look: PassTrace) -> Check:
    name = "loss sign"
    if "loss.sign-flipped" in context.claims:
        return from_finding(STEP, name, context.claims["loss.sign-flipped"], "not the negative of a loss")
    return passed(STEP, name, "the loss is not the negative of a known one", look.value)


def _causal(context: CheckContext) -> Check | None:
    """Where targets are the inputs shifted by one, a later token must not change an earlier output."""
    look = context.look
    if look is None or not look.recorded.losses or not look.recorded.lookups:
        return None
    call, ids = look.recorded.losses[-1], look.recorded.lookups[0].ids
    target = call.target
    if not call.has_indices or ids.dim() != 2 or ids.shape[1] < 3 or target.numel() != ids.numel():
        return None
    rows = target.reshape(ids.shape)
    if not bool((rows[:, :-1] == ids[:, 1:]).all()):
        return None
    return _changes_the_past(context, ids, look.recorded.lookups[0].table_rows)


def _changes_the_past(context: CheckContext, ids: Tensor, table_rows: int) -> Check | None:
    def later_token_changed(tensor: Tensor) -> Tensor:
        if tensor.shape != ids.shape or not torch.equal(tensor, ids):
            return tensor
        changed = tensor.clone()
        changed[:, -1] = (changed[:, -1] + 1) % table_rows
        return changed

    trial = context.trial()
    trial.model.eval()
    with torch.no_grad():
        before = trial.look(context.batch()).recorded.losses
        after = trial.look(map_leaves(context.batch(), later_token_changed)).recorded.losses
    if not before or not after or before[-1].input.numel() % ids.numel():
        return None
    one, other = (_by_position(calls[-1], ids) for calls in (before, after))
    moved = float((one[:, :-1] - other[:, :-1]).abs().max() / one.abs().max().clamp_min(1e-12))
    summary = f"changing the last token moves earlier outputs by {moved:.2g} of their size"
    if moved > 1e-3:
        return from_catalogue(STEP, "causal", "fail", "mask.leaks-future", summary, moved, "0")
    return passed(STEP, "causal", summary, moved, "0")


def _by_position(call: LossInput, ids: Tensor) -> Tensor:
    """Logits as (row, position, class), however the loss was given them."""
    value = call.input.float()
    if value.dim() == 3 and value.shape[0] == ids.shape[0] and value.shape[2] == ids.shape[1]:
        return value.transpose(1, 2)
    return value.reshape(*ids.shape, -1)
