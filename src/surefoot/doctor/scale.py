"""Step 6: the scale of activations and gradients by depth, equal units, and the batch size for BatchNorm.

A zero-initialised last layer or residual branch makes other gradients zero at first, which is healthy: equal units and
zeros only count if a few updates do not remove them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from surefoot.doctor.checks import Check, from_finding, passed, skipped
from surefoot.doctor.model_copy import ModelCopy, rms
from surefoot.record.facts import AlikeRows, LayerCall

if TYPE_CHECKING:
    from surefoot.doctor.context import CheckContext

STEP = 6
_FEW_UPDATES = 3


def check_scale(context: CheckContext) -> list[Check]:
    """Every layer in the first step of the rehearsal, and the effect of a few updates on equal units."""
    layers = [layer for layer in context.first_calls.layers if layer.in_std is not None and layer.trained_on]
    found = [_depth(context, layers), _symmetry(context)]
    return [*found, _gradient_depth(context), _batch_norm(context)]


def _depth(context: CheckContext, layers: list[LayerCall]) -> Check:
    name = "signal by depth"
    sound = skipped(STEP, name, "fewer than two layers with weights ran")
    if len(layers) > 1:
        first, last = layers[0].in_std or 0.0, layers[-1].in_std or 0.0
        summary = f"a spread of {first:.3g} goes in, {last:.3g} reaches `{layers[-1].module}`"
        sound = passed(STEP, name, summary, last / max(first, 1e-12), "about the spread of the input")
    return context.judged(("init.too-large", "init.too-small"), sound)


def _gradient_depth(context: CheckContext) -> Check:
    """Compare the gradients of the first and the last layer, per entry."""
    facts = context.facts
    order = dict.fromkeys(layer.parameter for layer in context.first_calls.layers if layer.parameter is not None)
    rows = {row.parameter: row for step in facts.sampled_steps[:1] for update in step.updates for row in update.rows}
    sizes = [
        (facts.parameters[number].label, grad / math.sqrt(math.prod(facts.parameters[number].shape)))
        for number in order
        if number in rows and (grad := rows[number].grad)
    ]
    name = "gradient by depth"
    sound = skipped(STEP, name, "too few layers with a gradient other than 0 to compare")
    if len(sizes) > 1:
        ratio = sizes[0][1] / sizes[-1][1]
        summary = f"the gradient of `{sizes[0][0]}` is {ratio:.3g} times that of `{sizes[-1][0]}`"
        sound = passed(STEP, name, summary, ratio, "about the same in the first and the last layer")
    return context.judged(("model.vanishing-gradient", "model.exploding-gradient"), sound)


def _symmetry(context: CheckContext) -> Check:
    name, expected = "units differ", "no layer with equal rows after a few updates"
    trial = context.trial(own_optimizer=False).without_dropout()
    alike = {found: weight.detach().clone() for found, weight in _weights(trial) if _rows_apart(weight) == 0.0}
    if not alike:
        return passed(STEP, name, "no layer starts with equal rows", 0, expected)
    trial.optimizer = torch.optim.Adam(trial.parameters, lr=1e-3)
    for step in range(_FEW_UPDATES):
        trial.step(context.batch(step))
    measured = [
        AlikeRows(parameter=found, updates=_FEW_UPDATES, apart=_rows_apart(weight), moved=rms(weight - alike[found]))
        for found, weight in _weights(trial)
        if found in alike
    ]
    context.measured(alike_rows=measured)
    sound = passed(
        STEP, name, f"{len(alike)} layers start with equal rows, which differ after the first updates", 0, expected
    )
    return context.judged(("init.symmetric",), sound)


def _weights(trial: ModelCopy) -> list[tuple[str, Tensor]]:
    return [
        (name, parameter)
        for name, parameter in trial.model.named_parameters()
        if parameter.dim() >= 2 and parameter.shape[0] > 1 and parameter.requires_grad
    ]


def _rows_apart(weight: Tensor) -> float:
    """The largest distance between a row and the first row."""
    rows = weight.detach().float().flatten(1)
    return float((rows - rows[:1]).abs().max())


def _batch_norm(context: CheckContext) -> Check:
    """How many values each mean of a BatchNorm is computed from."""
    name, expected, cause = "batch norm", "statistics over more than a few values", "model.batchnorm-tiny-batch"
    if not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in context.model.modules()):
        return skipped(STEP, name, "the model has no BatchNorm")
    if cause in context.claims:
        return from_finding(STEP, name, context.claims[cause], expected)
    facts = context.look.facts if context.look is not None else None
    calls = [call for call in (facts.calls.normalizations if facts is not None else ()) if call.training]
    if not calls:
        return skipped(STEP, name, "no BatchNorm ran in training mode")
    least = min(calls, key=lambda call: call.per_statistic or 0)
    summary = f"each statistic of `{least.module}` is computed from {least.per_statistic} values"
    return passed(STEP, name, summary, least.per_statistic, expected)
