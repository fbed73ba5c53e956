"""Step 4: the scale of inputs, activations and gradients before the first update, and the wiring."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from surefoot.doctor.checks import Check, failed, passed, skipped
from surefoot.doctor.function_calls import POINTWISE
from surefoot.doctor.model_copy import rms
from surefoot.doctor.wiring import check_wiring

if TYPE_CHECKING:
    from surefoot.doctor.context import CheckContext
    from surefoot.record.facts import SampledCalls

STEP = 4
_TARGETS_LARGE = 100.0


def check_statistics(context: CheckContext) -> list[Check]:
    """What the first step of the rehearsal shows."""
    calls = context.first_calls
    return [
        _inputs(context, calls),
        _targets(context),
        *_activations(context, calls),
        _gradients(context),
        *check_wiring(context),
    ]


def _inputs(context: CheckContext, calls: SampledCalls) -> Check:
    name, expected = "input scale", "root mean square near 1"
    first = next((call for call in calls.layers if call.in_std is not None), None)
    if first is None:
        text = "inputs are ids into an embedding" if calls.embeddings else "inputs contain no real numbers"
        return context.judged(("data.unscaled-input",), skipped(STEP, name, text))
    scale = math.hypot(first.in_std or 0.0, first.in_mean or 0.0)
    text = f"the first layer gets inputs with a root mean square of {scale:.4g}"
    return context.judged(("data.unscaled-input",), passed(STEP, name, text, scale, expected))


def _targets(context: CheckContext) -> Check:
    name, expected = "target scale", f"root mean square up to {_TARGETS_LARGE:g}"
    for call in context.look.recorded.losses if context.look is not None else ():
        if call.kind in POINTWISE and call.target.is_floating_point():
            scale = rms(call.target)
            summary = f"targets of `{call.kind}` have a root mean square of {scale:.4g}"
            if scale > _TARGETS_LARGE:
                fix = "Standardise the targets, and invert that on the predictions."
                return Check(STEP, name, "warn", summary, scale, expected, fix)
            return passed(STEP, name, summary, scale, expected)
    return skipped(STEP, name, "no real-valued targets")


def _activations(context: CheckContext, calls: SampledCalls) -> list[Check]:
    silent = [(call.dead or 0) / call.units for call in calls.activations if call.units]
    bound = [call.saturated for call in calls.activations if call.saturated is not None]
    units = skipped(STEP, "silent units", "no activation function was seen")
    if silent:
        text = f"up to {max(silent):.0%} of the units are 0 on every row of a batch"
        units = passed(STEP, "silent units", text, max(silent), "few")
    saturation = skipped(STEP, "saturation", "no sigmoid or tanh was seen")
    if bound:
        text = f"up to {max(bound):.0%} of the units are at the bound of a sigmoid or tanh"
        saturation = passed(STEP, "saturation", text, max(bound), "few")
    return [context.judged(("model.dead-units",), units), context.judged(("model.saturated-units",), saturation)]


def _gradients(context: CheckContext) -> Check:
    name, expected = "gradients", "finite and not 0"
    facts = context.facts
    if facts.crash is not None and not facts.steps:
        fix = "Make `backward()` run on one batch: no in-place change of a tensor that the graph still needs."
        return failed(STEP, name, f"backward raised: {facts.crash.message.splitlines()[0][:160]}", None, expected, fix)
    norm = next(iter(context.gradient_norms), 0.0)
    sound = passed(STEP, name, f"the gradient norm at step 0 is {norm:.4g}", norm, expected)
    if context.look is not None and not math.isfinite(context.look.value):
        fix = "The loss itself is not finite: see step 2."
        return failed(STEP, name, "the gradients are not finite", norm, expected, fix)
    return context.judged(("loss.undefined-op",), sound)
