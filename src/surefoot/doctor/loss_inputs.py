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
from surefoot.doctor.checks import Check, from_catalogue, passed
from surefoot.doctor.function_calls import POINTWISE, LossCall, broadcast_size

if TYPE_CHECKING:
    from surefoot.doctor.context import CheckContext
    from surefoot.doctor.model_copy import PassTrace

STEP = 2
_DRAWS = 8
_SHAKEN_ROWS = 16
_SUM_TOLERANCE = 1e-2
_BEYOND = 0.01
"""Share of the targets that must lie beyond a bound before it is called one that they cross."""


def check_agreement(bench: CheckContext) -> list[Check]:
    """Judge what reaches the loss."""
    look = bench.look
    assert look is not None
    calls = look.recorded.losses
    checks = [_shape_check(look), _input_check(bench, calls[-1] if calls else None)]
    if look.error is None:
        checks += [_finite(bench, look), _sign(look)]
        causal = _causal(bench)
        checks += [] if causal is None else [causal]
    return checks


def _shape_check(look: PassTrace) -> Check:
    name = "target shape"
    for call in look.recorded.losses:
        one, other = tuple(call.input.shape), tuple(call.target.shape)
        if call.kind in POINTWISE and one != other and _grows(one, other):
            return _broadcast(name, one, other)
    for one, other in look.recorded.differences:
        if _rows_against_rows(one, other):
            return _broadcast(name, one, other)
    if not look.recorded.losses:
        return passed(STEP, name, "no difference of prediction and target spreads over a larger shape")
    call = look.recorded.losses[-1]
    return passed(STEP, name, f"prediction {tuple(call.input.shape)} and target {tuple(call.target.shape)}")


def _broadcast(name: str, one: tuple[int, ...], other: tuple[int, ...]) -> Check:
    size = broadcast_size(one, other)
    summary = f"prediction {one} and target {other} are compared as {size:,} pairs: every row with every other"
    return from_catalogue(STEP, name, "fail", "loss.broadcast", summary, size, "equal shapes")


def _grows(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return broadcast_size(one, other) > max(math.prod(one), math.prod(other))


def _rows_against_rows(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return sorted((one, other), key=len) == [(one[0],), (one[0], 1)]


def _input_check(bench: CheckContext, call: LossCall | None) -> Check:
    name = "loss input"
    if call is None:
        return passed(STEP, name, "the loss is written by hand: nothing known to compare its input with")
    if call.kind == "cross_entropy":
        return _into_cross_entropy(bench, name, call)
    if call.kind in ("nll_loss", "kl_div"):
        return _into_log_probabilities(name, call)
    if call.kind == "binary_cross_entropy":
        return _into_probabilities(name, call)
    if call.kind == "binary_cross_entropy_with_logits":
        return _into_logits(bench, name, call)
    return _against_bounds(bench, name, call)


def _into_cross_entropy(bench: CheckContext, name: str, call: LossCall) -> Check:
    value, dim, expected = call.input.float(), call.class_dim, "logits: any real numbers"
    count = call.class_count
    off = float((value.sum(dim) - 1.0).abs().max()) if value.numel() else math.nan
    if count > 1 and float(value.min()) >= 0.0 and off < _SUM_TOLERANCE:
        floor = math.log(math.e + count - 1) - 1.0
        summary = (
            f"every row that reaches cross_entropy is >= 0 and sums to 1 (within {off:.1g}): probabilities, not "
            f"logits; the loss cannot fall under {floor:.3f}"
        )
        return from_catalogue(STEP, name, "fail", "loss.softmax-before-cross-entropy", summary, off, expected)
    low, high = _shaken_range(bench, call)
    bounds = _bounds(low, high)
    if bounds is not None:
        summary = f"what reaches cross_entropy stays within {bounds} whatever the weights: no class can become certain"
        return from_catalogue(STEP, name, "fail", "loss.bounded-output", summary, high, expected)
    summary = f"logits from {float(value.min()):.3g} to {float(value.max()):.3g} go into cross_entropy"
    return passed(STEP, name, summary, float(value.abs().max()), expected)


def _into_log_probabilities(name: str, call: LossCall) -> Check:
    dim = call.class_dim if call.kind == "nll_loss" else -1
    expected = "log-probabilities: their exponentials sum to 1"
    off = float((call.input.float().exp().sum(dim) - 1.0).abs().max()) if call.input.numel() else math.nan
    if math.isnan(off):
        return passed(STEP, name, f"what reaches {call.kind} is not finite, and cannot be judged", off, expected)
    if call.kind == "nll_loss" and off > _SUM_TOLERANCE * 5:
        summary = f"{call.kind} gets rows whose exponentials miss 1 by up to {off:.3g}: no log-probabilities"
        return from_catalogue(STEP, name, "fail", "loss.logits-into-probability-loss", summary, off, expected)
    if call.kind == "kl_div" and float(call.input.max()) > 1e-3:
        summary = f"kl_div gets {float(call.input.max()):.3g} where log-probabilities, at most 0, are expected"
        return from_catalogue(STEP, name, "fail", "loss.logits-into-probability-loss", summary, off, expected)
    return passed(STEP, name, f"log-probabilities go into {call.kind}", off, expected)


def _into_probabilities(name: str, call: LossCall) -> Check:
    low, high = (float(bound) for bound in call.input.float().aminmax())
    expected = "probabilities from 0 to 1"
    if low < 0.0 or high > 1.0:
        summary = f"binary_cross_entropy gets values from {low:.3g} to {high:.3g}: logits, not probabilities"
        number = max(-low, high - 1.0)
        return from_catalogue(STEP, name, "fail", "loss.logits-into-probability-loss", summary, number, expected)
    return passed(STEP, name, f"probabilities from {low:.3g} to {high:.3g} go into BCE", high, expected)


def _into_logits(bench: CheckContext, name: str, call: LossCall) -> Check:
    low, high = (float(bound) for bound in call.input.float().aminmax())
    expected = "logits: any real numbers"
    if low >= 0.0 and high <= 1.0:
        low, high = _shaken_range(bench, call)
        if low >= 0.0 and high <= 1.0:
            summary = (
                "what reaches BCE-with-logits stays between 0 and 1 whatever the weights: a sigmoid comes before the "
                "one inside the loss"
            )
            return from_catalogue(STEP, name, "fail", "loss.sigmoid-before-bce-logits", summary, high, expected)
    return passed(STEP, name, f"logits from {low:.3g} to {high:.3g} go into BCE-with-logits", high, expected)


def _against_bounds(bench: CheckContext, name: str, call: LossCall) -> Check:
    """A regression whose output is bounded, and whose targets are not."""
    low, high = _shaken_range(bench, call)
    targets = call.target.float()
    expected = "targets within reach of the output"
    if targets.numel():
        margin = 1e-3 * max(1.0, abs(low), abs(high))
        bounded_below = low in (0.0, -1.0) or abs(low + 1.0) < 1e-2 or 0.0 <= low < 1e-2
        below = float((targets < low - margin).float().mean()) if bounded_below else 0.0
        above = float((targets > high + margin).float().mean()) if abs(high - 1.0) < 1e-2 else 0.0
        share = below + above
        if share > _BEYOND:
            summary = (
                f"the output stays within {low:.3g} to {high:.3g} whatever the weights, and {share:.0%} of the targets "
                f"({float(targets.min()):.3g} to {float(targets.max()):.3g}) lie beyond"
            )
            return from_catalogue(STEP, name, "fail", "loss.bounded-output", summary, share, expected)
    return passed(STEP, name, f"predictions go into {call.kind}", None, expected)


def _bounds(low: float, high: float) -> str | None:
    """The interval that a bounded activation would give, if the range seen is one."""
    if low >= 0.0 and high <= 1.0:
        return "0 to 1"
    if low >= -1.0 and high <= 1.0 and high - low > 1.5:
        return "-1 to 1"
    return None


def _shaken_range(bench: CheckContext, call: LossCall) -> tuple[float, float]:
    """Smallest and largest value that reaches the loss under weights thrown far from where they are."""
    low, high = math.inf, -math.inf
    for draw in range(_DRAWS):
        trial = bench.trial()
        torch.manual_seed(draw)
        with torch.no_grad():
            for parameter in trial.model.parameters():
                _shake(parameter)
        look = trial.look(bench.batch(rows=_SHAKEN_ROWS))
        same = [seen.input.float() for seen in look.recorded.losses if seen.kind == call.kind]
        if same and same[-1].numel() and bool(same[-1].isfinite().all()):
            low, high = min(low, float(same[-1].min())), max(high, float(same[-1].max()))
    return (low, high) if low <= high else (-math.inf, math.inf)


def _shake(parameter: Tensor) -> None:
    if parameter.is_floating_point():
        scale = float(parameter.float().square().mean().sqrt()) if parameter.numel() else 0.0
        parameter.add_(torch.randn_like(parameter) * (5.0 * scale + 0.5 * (parameter.dim() < 2)))


def _finite(bench: CheckContext, look: PassTrace) -> Check:
    name = "first loss"
    if math.isfinite(look.value):
        return passed(STEP, name, f"the first loss is {look.value:.4g}", look.value, "finite")
    again = bench.trial().look(bench.batch(), trace_nan=True)
    if look.recorded.fully_masked:
        where = look.recorded.fully_masked[0]
        summary = f"a softmax in `{where}` gets a row that is masked everywhere, and the loss is {look.value}"
        return from_catalogue(STEP, name, "fail", "mask.fully-masked-row", summary, look.value, "finite")
    cause = "data.nonfinite-input" if _input_broken(bench) else "loss.undefined-op"
    made = again.recorded.first_nan
    where = f"first made by `{made[0]}` in `{made[1] or 'the loss'}`" if made else "no single operation made a NaN"
    if look.first_nonfinite is not None:
        where += f"; the first module with such an output is `{look.first_nonfinite}`"
    summary = f"the first loss is {look.value} before any update: {where}"
    return from_catalogue(STEP, name, "fail", cause, summary, look.value, "finite")


def _input_broken(bench: CheckContext) -> bool:
    return any(t.is_floating_point() and not bool(t.isfinite().all()) for _, t in leaves(bench.batches[0]))


def _sign(look: PassTrace) -> Check:
    """A known loss is never negative; if the total is exactly its negative, somebody negated it."""
    name = "loss sign"
    for call in look.recorded.losses:
        if call.value is None or call.value.numel() != 1:
            continue
        value = float(call.value)
        valid = call.kind != "nll_loss" and call.kind != "kl_div"
        if valid and value > 0.0 and math.isclose(look.value, -value, rel_tol=1e-5):
            summary = f"the loss is {look.value:.4g}, the exact negative of {call.kind}: minimising it unlearns"
            return from_catalogue(STEP, name, "fail", "loss.sign-flipped", summary, look.value, "not negative")
    return passed(STEP, name, "the loss is not the negative of a known one", look.value)


def _causal(bench: CheckContext) -> Check | None:
    """Where targets are the inputs shifted by one, a later token must not change an earlier output."""
    look = bench.look
    if look is None or not look.recorded.losses or not look.recorded.lookups:
        return None
    call, ids = look.recorded.losses[-1], look.recorded.lookups[0].ids
    target = call.target
    if not call.has_indices or ids.dim() != 2 or ids.shape[1] < 3 or target.numel() != ids.numel():
        return None
    rows = target.reshape(ids.shape)
    if not bool((rows[:, :-1] == ids[:, 1:]).all()):
        return None
    return _changes_the_past(bench, ids, look.recorded.lookups[0].table_rows)


def _changes_the_past(bench: CheckContext, ids: Tensor, table_rows: int) -> Check | None:
    def later_token_changed(tensor: Tensor) -> Tensor:
        if tensor.shape != ids.shape or not torch.equal(tensor, ids):
            return tensor
        changed = tensor.clone()
        changed[:, -1] = (changed[:, -1] + 1) % table_rows
        return changed

    trial = bench.trial()
    trial.model.eval()
    with torch.no_grad():
        before = trial.look(bench.batch()).recorded.losses
        after = trial.look(map_leaves(bench.batch(), later_token_changed)).recorded.losses
    if not before or not after or before[-1].input.numel() % ids.numel():
        return None
    one, other = (_by_position(calls[-1], ids) for calls in (before, after))
    moved = float((one[:, :-1] - other[:, :-1]).abs().max() / one.abs().max().clamp_min(1e-12))
    summary = f"changing the last token moves earlier outputs by {moved:.2g} of their size"
    if moved > 1e-3:
        return from_catalogue(STEP, "causal", "fail", "mask.leaks-future", summary, moved, "0")
    return passed(STEP, "causal", summary, moved, "0")


def _by_position(call: LossCall, ids: Tensor) -> Tensor:
    """Logits as (row, position, class), however the loss was given them."""
    value = call.input.float()
    if value.dim() == 3 and value.shape[0] == ids.shape[0] and value.shape[2] == ids.shape[1]:
        return value.transpose(1, 2)
    return value.reshape(*ids.shape, -1)
