"""Step 4, second half: is every parameter connected, from the loss through its gradient to the optimizer?

The rules judge the rehearsal. Not reported: parameters frozen on purpose, and modules that ran without gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from surefoot.diagnose.initial_weights import size_of
from surefoot.doctor.checks import Check, passed, skipped, warned
from surefoot.record.facts import MomentScale, ParameterFacts

if TYPE_CHECKING:
    from surefoot.doctor.context import CheckContext
    from surefoot.doctor.model_copy import PassTrace

STEP = 4
_FEW = 0.05
_MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer", "square_avg")


def check_wiring(context: CheckContext) -> list[Check]:
    """What the rehearsal shows about the parameters."""
    owned = [held for held in context.facts.parameters if held.model and held.registered]
    return [
        _frozen(context, owned),
        _reached(context, owned),
        _in_optimizer(context),
        _registered(context),
        _state(context),
    ]


def _frozen(context: CheckContext, owned: Sequence[ParameterFacts]) -> Check:
    total, frozen = size_of(owned), size_of([held for held in owned if not held.requires_grad])
    summary, expected = (
        f"{frozen:,} of {total:,} parameters are frozen",
        "every parameter to be trained requires a gradient",
    )
    sound = passed(STEP, "frozen", summary, frozen / max(1, total), expected)
    return context.judged(("optim.frozen-parameters",), sound)


def _reached(context: CheckContext, owned: Sequence[ParameterFacts]) -> Check:
    name, expected = "gradient reaches", "every parameter that was used has a gradient"
    trainable = [held for held in owned if held.requires_grad]
    reached = sum(held.in_graph > 0 for held in trainable)
    sound = passed(STEP, name, f"{reached} of {len(trainable)} parameters get a gradient", reached, expected)
    unused = [held for held in trainable if not held.used and not held.in_graph]
    share = size_of(unused) / max(1, size_of(owned))
    if share > _FEW and reached:
        some = ", ".join(held.label for held in unused[:3]) + (
            f" and {len(unused) - 3} more" if len(unused) > 3 else ""
        )
        fix = "Use these modules in `forward`, or remove them; in DDP they need `find_unused_parameters=True`."
        sound = warned(STEP, name, f"{share:.0%} of the parameters were not used: {some}", share, expected, fix)
    return context.judged(("optim.detached-graph",), sound)


def _in_optimizer(context: CheckContext) -> Check:
    name = "in the optimizer"
    if context.optimizer is None:
        return skipped(STEP, name, "no optimizer was given")
    count = sum(len(group["params"]) for group in context.optimizer.param_groups)
    sound = passed(STEP, name, f"the optimizer has {count} tensors", count, "every parameter that gets a gradient")
    return context.judged(("optim.parameters-missing",), sound)


def _registered(context: CheckContext) -> Check:
    expected = "0 trained tensors that no module owns"
    text = "every tensor that gets a gradient is owned by a module or the optimizer"
    return context.judged(("model.unregistered-parameters",), passed(STEP, "registered", text, 0, expected))


def _state(context: CheckContext) -> Check:
    """After a resume: do the moments belong to these parameters?"""
    name, expected = "optimizer state", "moments with the shape and scale of their gradients"
    if context.optimizer is None or not context.optimizer.state:
        return passed(STEP, name, "the optimizer starts without state", 0, expected)
    trial = context.trial()
    backward(trial.look(context.batch()))
    state = trial.optimizer.state
    moments = [found for parameter, held in state.items() for found in _moments(parameter, held)]
    context.measured(moments=moments)
    worst = max((found.gradient_ratio for found in moments if found.gradient_ratio is not None), default=1.0)
    summary = f"gradients are at most {worst:.3g} times the root of the second moments"
    return context.judged(("optim.stale-state",), passed(STEP, name, summary, worst, expected))


def _moments(parameter: Tensor, state: Mapping[str, Any]) -> list[MomentScale]:
    return [
        MomentScale(
            moment=key,
            shape=list(value.shape),
            parameter_shape=list(parameter.shape),
            gradient_ratio=_ratio(value, parameter.grad) if key == "exp_avg_sq" else None,
        )
        for key, value in state.items()
        if key in _MOMENTS and isinstance(value, Tensor)
    ]


def _ratio(moment: Tensor, gradient: Tensor | None) -> float | None:
    """How many times the gradient exceeds the root of Adam's second moment."""
    if gradient is None or moment.shape != gradient.shape:
        return None
    remembered, fresh = float(moment.float().mean().sqrt()), float(gradient.float().square().mean().sqrt())
    return fresh / remembered if remembered > 0.0 and fresh > 0.0 else None


def backward(look: PassTrace) -> None:
    """Run the backward pass, if there is one; the rehearsal reports it if it raises."""
    if look.loss is not None and look.loss.requires_grad:
        torch.autograd.backward(look.loss)
