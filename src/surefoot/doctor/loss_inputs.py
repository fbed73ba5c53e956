"""Step 2: does the loss get the input that it expects? Judged by values, never by the names of layers.

Probabilities are recognised by their sum of 1. A range is harder: untrained logits of a single output may all happen to
be between 0 and 1. So the weights of a copy are changed strongly, several times; logits leave the interval, the output
of a sigmoid never does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from surefoot.doctor.checks import Check, failed, from_finding, passed, skipped
from surefoot.doctor.function_calls import POINTWISE, LossInput
from surefoot.doctor.probe_facts import judge
from surefoot.record.facts import OutputRange

if TYPE_CHECKING:
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
_PERTURBED_ROWS = 16


def check_agreement(context: CheckContext) -> list[Check]:
    """Judge the input of the loss."""
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
        return passed(STEP, name, "no difference of prediction and target is broadcast to a larger shape")
    call = look.recorded.losses[-1]
    return passed(STEP, name, f"prediction {tuple(call.input.shape)} and target {tuple(call.target.shape)}")


def _input_check(context: CheckContext, call: LossInput | None) -> Check:
    name = "loss input"
    if call is None:
        return skipped(STEP, name, "the loss is custom code, so the expected input is not known")
    expected = _EXPECTED.get(call.kind, "targets within the range of the output")
    for cause in _JUDGED:
        if cause in context.claims:
            return from_finding(STEP, name, context.claims[cause], expected)
    if not call.input.numel() or not bool(call.input.isfinite().all()):
        return skipped(STEP, name, f"the input of {call.kind} is empty or not finite, and cannot be judged")
    if call.kind == "binary_cross_entropy_with_logits":
        found = _in_unit_interval_if_perturbed(context, call)
        if found is not None:
            return from_finding(STEP, name, found, expected)
    low, high = (float(bound) for bound in call.input.float().aminmax())
    sound = passed(STEP, name, f"values from {low:.3g} to {high:.3g} go into {call.kind}", high, expected)
    if call.kind != "cross_entropy" and call.kind not in POINTWISE:
        return sound
    _measure_range(context, call)
    return context.judged(("loss.bounded-output",), sound)


def _in_unit_interval_if_perturbed(context: CheckContext, call: LossInput) -> Finding | None:
    """The finding about logits that stay between 0 and 1 whatever the weights are: a few may be there by chance."""
    low, high = (float(bound) for bound in call.input.float().aminmax())
    if low < 0.0 or high > 1.0:
        return None
    assert context.look is not None
    return judge([context.look, *_perturbed_passes(context)]).get("loss.sigmoid-before-bce-logits")


def _measure_range(context: CheckContext, call: LossInput) -> None:
    """The smallest and the largest input of the loss with weights changed by a large random amount."""
    seen = [
        found[-1]
        for look in _perturbed_passes(context)
        if (found := [other.input.float() for other in look.recorded.losses if other.kind == call.kind])
    ]
    values = [value for value in seen if value.numel() and bool(value.isfinite().all())]
    targets = call.target.float()
    if not values or not targets.numel():
        return
    low, high = min(float(value.min()) for value in values), max(float(value.max()) for value in values)
    margin = 1e-3 * max(1.0, abs(low), abs(high))
    context.measured(
        output_range=OutputRange(
            loss=call.kind,
            low=low,
            high=high,
            target_low=float(targets.min()),
            target_high=float(targets.max()),
            below=float((targets < low - margin).float().mean()),
            above=float((targets > high + margin).float().mean()),
        )
    )


def _perturbed_passes(context: CheckContext) -> Iterator[PassTrace]:
    """Passes over a few rows with weights changed by a large random amount."""
    for draw in range(_DRAWS):
        trial = context.trial()
        torch.manual_seed(draw)
        with torch.no_grad():
            for parameter in trial.model.parameters():
                _perturb(parameter)
        yield trial.look(context.batch(rows=_PERTURBED_ROWS))


def _perturb(parameter: Tensor) -> None:
    if parameter.is_floating_point():
        scale = float(parameter.float().square().mean().sqrt()) if parameter.numel() else 0.0
        if not scale and parameter.dim() > 1:  # a layer that starts at 0 would stay there, and look bounded
            scale = 1.0 / math.sqrt(max(1, parameter[0].numel()))
        parameter.add_(torch.randn_like(parameter) * (5.0 * scale + 0.5 * (parameter.dim() < 2)))


def _finite(context: CheckContext, look: PassTrace) -> Check:
    name = "first loss"
    if math.isfinite(look.value):
        return passed(STEP, name, f"the first loss is {look.value:.4g}", look.value, "finite")
    where = (
        f"the first module with such an output is `{look.first_nonfinite}`" if look.first_nonfinite else "in the loss"
    )
    fix = "Print the model's outputs on one batch, which are the input of the loss."
    unknown = failed(
        STEP, name, f"the first loss is {look.value} before any update: {where}", look.value, "finite", fix
    )
    causes = ("mask.fully-masked-row", "data.nonfinite-input", "loss.no-valid-targets", "loss.undefined-op")
    return context.judged(causes, unknown)


def _sign(context: CheckContext, look: PassTrace) -> Check:
    name = "loss sign"
    if "loss.sign-flipped" in context.claims:
        return from_finding(STEP, name, context.claims["loss.sign-flipped"], "not the negative of a loss")
    return passed(STEP, name, "the loss is not the negative of a known one", look.value)


def _causal(context: CheckContext) -> Check | None:
    """If targets are the inputs shifted by one, a later token must not change an earlier output."""
    backwards = [call for step in context.facts.sampled_steps for call in step.backward_calls]
    measured = [call.causality for call in backwards if call.causality is not None and call.causality.applies]
    if not measured:
        return None
    summary = f"outputs do not depend on later tokens ({measured[0].positions} positions)"
    return context.judged(("mask.leaks-future",), passed(STEP, "causal", summary, measured[0].from_future, "0"))
