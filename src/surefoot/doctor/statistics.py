"""Step 4: the scale of inputs, activations and gradients before the first update, and the wiring.

What counts as an input is what reaches the first layer that has a weight: a model that scales its own inputs is fine.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from surefoot.doctor.batches import leaves
from surefoot.doctor.checks import Check, Status, failed, from_catalogue, passed
from surefoot.doctor.function_calls import POINTWISE
from surefoot.doctor.model_copy import ModelCopy, PassTrace, rms
from surefoot.doctor.wiring import backward, check_wiring

if TYPE_CHECKING:
    from surefoot.doctor.context import CheckContext

STEP = 4
_LARGE, _HUGE, _SMALL = 10.0, 100.0, 1e-3
_TARGETS_LARGE = 100.0
_SILENT, _SATURATED = 0.9, 0.5


def check_statistics(context: CheckContext) -> list[Check]:
    """One pass forward and back on a copy, all numbers read."""
    trial = context.trial()
    look = trial.look(context.batch())
    trouble = backward(look)
    checks = [_inputs(context, look), _targets(look), *_activations(look), _gradients(context, trial, look, trouble)]
    return [*checks, *check_wiring(context, trial, look)]


def _inputs(context: CheckContext, look: PassTrace) -> Check:
    name, expected = "input scale", f"root mean square from {_SMALL:g} to {_LARGE:g}"
    floats = [tensor for _, tensor in leaves(context.batches[0]) if tensor.is_floating_point()]
    if look.recorded.lookups and not _large_floats(floats):
        return passed(STEP, name, "inputs are ids into an embedding")
    scale = next((layer.input_rms for layer in look.layers if not math.isnan(layer.input_rms)), math.nan)
    if math.isnan(scale):
        scale = rms(floats[0]) if floats else math.nan
    if math.isnan(scale):
        return passed(STEP, name, "inputs hold no real numbers")
    summary = f"the first layer gets inputs with a root mean square of {scale:.4g}"
    if scale > _LARGE or 0.0 < scale < _SMALL:
        status: Status = "fail" if scale > _HUGE else "warn"
        return from_catalogue(STEP, name, status, "data.unscaled-input", summary, scale, expected)
    return passed(STEP, name, summary, scale, expected)


def _large_floats(floats: list[Tensor]) -> bool:
    return any(rms(tensor) > _LARGE for tensor in floats)


def _targets(look: PassTrace) -> Check:
    name, expected = "target scale", f"root mean square up to {_TARGETS_LARGE:g}"
    for call in look.recorded.losses:
        if call.kind in POINTWISE and call.target.is_floating_point():
            scale = rms(call.target)
            summary = f"targets of `{call.kind}` have a root mean square of {scale:.4g}"
            if scale > _TARGETS_LARGE:
                fix = "Standardise the targets, and undo it on the predictions."
                return Check(STEP, name, "warn", summary, scale, expected, fix)
            return passed(STEP, name, summary, scale, expected)
    return passed(STEP, name, "no real-valued targets")


def _activations(look: PassTrace) -> list[Check]:
    silent, silent_at, bound, bound_at = 0.0, "", 0.0, ""
    for activation in look.recorded.activations:
        if activation.kind.startswith("relu"):
            units = activation.silent_units()
            share = float(units.float().mean()) if units.numel() else 0.0
            if share > silent:
                silent, silent_at = share, activation.where
        elif activation.saturated_share() > bound:
            bound, bound_at = activation.saturated_share(), activation.where
    return [
        _share("silent units", "model.dead-units", silent, silent_at, _SILENT, "are 0 on every row of a batch"),
        _share(
            "saturation", "model.saturated-units", bound, bound_at, _SATURATED, "lie at the bound of a sigmoid or tanh"
        ),
    ]


def _share(name: str, cause: str, share: float, where: str, limit: float, what: str) -> Check:
    expected = f"less than {limit:.0%}"
    summary = f"up to {share:.0%} of the units {what}" + (f" (in `{where or 'the model'}`)" if share else "")
    if share > limit:
        status: Status = "fail" if cause == "model.dead-units" and share > 0.999 else "warn"
        return from_catalogue(STEP, name, status, cause, summary, share, expected)
    return passed(STEP, name, summary, share, expected)


def _gradients(context: CheckContext, trial: ModelCopy, look: PassTrace, trouble: str | None) -> Check:
    name, expected = "gradients", "finite and not 0"
    if trouble is not None:
        fix = "Make `backward()` run on one batch: no in-place change of a tensor that the graph still needs."
        return failed(STEP, name, f"backward raised: {trouble}", None, expected, fix)
    norm = trial.gradient_norm()
    broken = [
        parameter_name
        for parameter_name, parameter in trial.model.named_parameters()
        if parameter.grad is not None and not bool(parameter.grad.to_dense().isfinite().all())
    ]
    if broken and math.isfinite(look.value):
        summary = f"the loss is finite and the gradient of {broken[0]} is not{_culprit(context)}"
        return from_catalogue(STEP, name, "fail", "loss.undefined-op", summary, math.nan, expected)
    if broken:
        fix = "The loss itself is not finite: see step 2."
        return failed(STEP, name, f"{len(broken)} gradients are not finite", math.nan, expected, fix)
    return passed(STEP, name, f"the gradient norm at step 0 is {norm:.4g}", norm, expected)


def _culprit(context: CheckContext) -> str:
    """Which backward first made a NaN, from autograd's own tracing."""
    trial = context.trial()
    with torch.autograd.detect_anomaly(check_nan=True):
        trouble = backward(trial.look(context.batch()))
    found = re.search(r"Function '(\w+)Backward\d*'", trouble or "")
    return f": the backward of `{found[1].lower()}` makes the first NaN" if found else ""
