"""Step 6: does the scale of signals survive the depth, are units different, and is there enough for BatchNorm?

Measured before the first update. What a zero-initialised last layer or residual branch does to the gradients of the
others is healthy and left alone: symmetry and zeros only count when a few updates do not remove them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from surefoot.doctor.checks import Check, from_catalogue, from_finding, passed, skipped
from surefoot.doctor.model_copy import LayerTrace, ModelCopy, PassTrace, rms
from surefoot.doctor.wiring import backward

if TYPE_CHECKING:
    from surefoot.doctor.context import CheckContext

STEP = 6
_GROWN, _DIED = 1e3, 1e-4
_GRADIENT_GONE, _GRADIENT_GROWN = 1e-5, 1e4
_FEW_UPDATES = 3
_ROUNDING = 1e-2
"""Share of an update by which rounding may part rows that get the same gradient."""


def check_scale(context: CheckContext) -> list[Check]:
    """PassTrace at every layer before the first update."""
    trial = context.trial().without_dropout()
    look = trial.look(context.batch())
    backward(look)
    layers = [layer for layer in look.layers if math.isfinite(layer.input_rms)]
    found = [_depth(layers), _symmetry(context)]
    explained = any(check.status == "fail" for check in found)
    return [*found, _gradient_depth(layers, explained), _start(context, look), _batch_norm(context)]


def _depth(layers: list[LayerTrace]) -> Check:
    name, expected = "signal by depth", f"within {_DIED:g} to {_GROWN:g} times the input"
    if len(layers) < 2:
        return passed(STEP, name, "fewer than two layers with weights ran")
    first, last = layers[0].input_rms, layers[-1].input_rms
    top = max(layers, key=lambda layer: layer.output_rms)
    scale = max(first, 1e-12)
    summary = f"root mean square {first:.3g} goes in, {last:.3g} reaches `{layers[-1].name}`"
    if top.output_rms > _GROWN * max(scale, 1.0):
        summary += f", at most {top.output_rms:.3g} in `{top.name}`"
        return from_catalogue(STEP, name, "fail", "init.too-large", summary, top.output_rms / scale, expected)
    first_varies, last_varies = layers[0].input_variation, layers[-1].input_variation
    kept = last_varies / first_varies if first_varies > 0.0 else 1.0
    if kept < _DIED:
        summary += f", and {kept:.2g} of how rows differ"
        return from_catalogue(STEP, name, "fail", "init.too-small", summary, kept, expected)
    return passed(STEP, name, summary, last / scale, expected)


def _gradient_depth(layers: list[LayerTrace], explained: bool) -> Check:
    """Compare the gradients of the first and the last layer, entry for entry."""
    name, expected = "gradient by depth", f"first over last within {_GRADIENT_GONE:g} to {_GRADIENT_GROWN:g}"
    seen = [(layer.name, scale) for layer in layers if (scale := _gradient_scale(layer.module)) is not None]
    if len(seen) < 2 or not all(math.isfinite(scale) for _, scale in seen) or 0.0 in (seen[0][1], seen[-1][1]):
        return passed(STEP, name, "too few layers with a gradient other than 0 to compare")
    if explained:
        return passed(STEP, name, "whatever the gradients are, the initial weights above explain them")
    ratio = seen[0][1] / seen[-1][1]
    summary = f"the gradient of `{seen[0][0]}` is {ratio:.3g} times that of `{seen[-1][0]}`"
    if ratio < _GRADIENT_GONE:
        return from_catalogue(STEP, name, "warn", "model.vanishing-gradient", summary, ratio, expected)
    if ratio > _GRADIENT_GROWN:
        return from_catalogue(STEP, name, "warn", "model.exploding-gradient", summary, ratio, expected)
    return passed(STEP, name, summary, ratio, expected)


def _gradient_scale(module: nn.Module) -> float | None:
    gradients = [p.grad for p in module.parameters(recurse=False) if p.dim() >= 2 and p.grad is not None]
    return rms(gradients[0].to_dense()) if gradients else None


def _start(context: CheckContext, look: PassTrace) -> Check:
    """An untrained classifier should know nothing: its loss is ln C."""
    name = "starts at chance"
    calls = [call for call in look.recorded.losses if call.kind == "cross_entropy" and call.has_indices]
    if len(calls) != 1 or calls[0].settings.get("reduction") != "mean" or calls[0].value is None:
        return passed(STEP, name, "no single mean cross-entropy to compare with chance")
    value, count = float(calls[0].value), calls[0].class_count
    chance = math.log(max(count, 2))
    summary = f"the first loss is {value:.3g}; chance over {count} classes is {chance:.3g}"
    expected = f"up to {3 * chance + 1:.3g}"
    if value > 3 * chance + 1 and not context.found("data.unscaled-input"):
        return from_catalogue(STEP, name, "warn", "init.too-large", summary, value, expected)
    return passed(STEP, name, summary, value, expected)


def _symmetry(context: CheckContext) -> Check:
    name, expected = "units differ", "no layer with equal rows after a few updates"
    trial = context.trial(own_optimizer=False).without_dropout()
    alike = {found: weight.detach().clone() for found, weight in _weights(trial) if _rows_apart(weight) == 0.0}
    if not alike:
        return passed(STEP, name, "no layer starts with equal rows", 0, expected)
    trial.optimizer = torch.optim.Adam(trial.parameters, lr=1e-3)
    for step in range(_FEW_UPDATES):
        trial.step(context.batch(step))
    still = [
        found
        for found, weight in _weights(trial)
        if found in alike and _rows_apart(weight) <= _ROUNDING * rms(weight - alike[found])
    ]
    if still:
        summary = f"all rows of {', '.join(still[:3])} are equal, and still are after {_FEW_UPDATES} updates"
        return from_catalogue(STEP, name, "fail", "init.symmetric", summary, len(still), expected)
    return passed(STEP, name, f"{len(alike)} layers start with equal rows and part at once", 0, expected)


def _weights(trial: ModelCopy) -> list[tuple[str, Tensor]]:
    return [
        (name, parameter)
        for name, parameter in trial.model.named_parameters()
        if parameter.dim() >= 2 and parameter.shape[0] > 1 and parameter.requires_grad
    ]


def _rows_apart(weight: Tensor) -> float:
    """How far rows are from the first row, at most."""
    rows = weight.detach().float().flatten(1)
    return float((rows - rows[:1]).abs().max())


def _batch_norm(context: CheckContext) -> Check:
    """How many values each mean of a BatchNorm is taken over."""
    name, expected, cause = "batch norm", "statistics over more than a few values", "model.batchnorm-tiny-batch"
    if not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in context.model.modules()):
        return passed(STEP, name, "the model has no BatchNorm")
    if cause in context.claims:
        return from_finding(STEP, name, context.claims[cause], expected)
    facts = context.look.facts if context.look is not None else None
    calls = [call for call in (facts.calls.normalizations if facts is not None else ()) if call.training]
    if not calls:
        return skipped(STEP, name, "no BatchNorm ran in training mode")
    least = min(calls, key=lambda call: call.per_statistic or 0)
    summary = f"each statistic of `{least.module}` is taken over {least.per_statistic} values"
    return passed(STEP, name, summary, least.per_statistic, expected)
