"""Step 4, second half: is every parameter connected, from the loss through its gradient to the optimizer?

Read off the autograd graph of one pass: which leaves the loss depends on, which of them the model owns, and which of
those the optimizer was given. Left alone: parameters frozen on purpose, parameters of modules that did not run, and
modules that ran with gradients off.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from surefoot.core.nested import leaves
from surefoot.doctor.checks import Check, Status, from_catalogue, passed, skipped, warned

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from surefoot.doctor.context import CheckContext
    from surefoot.doctor.model_copy import ModelCopy, PassTrace

STEP = 4
_FEW = 0.05
_MOST = 0.5
_FAR = 1e3
_MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer", "square_avg")


def check_wiring(context: CheckContext, trial: ModelCopy, look: PassTrace) -> list[Check]:
    """Judge the wiring of one pass through `trial`, after its backward."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in trial.model.named_parameters()}
    return [
        _frozen(context, names),
        _reached(look, names),
        _in_optimizer(trial, names),
        _registered(trial, look, names),
        _state(trial),
    ]


def _frozen(context: CheckContext, names: dict[Tensor, str]) -> Check:
    total = sum(parameter.numel() for parameter in names)
    frozen = sum(parameter.numel() for parameter in names if not parameter.requires_grad)
    share = frozen / total if total else 0.0
    summary = f"{frozen:,} of {total:,} parameters are frozen"
    if share > _MOST and (frozen == total or (context.tiny_left or 0.0) > _MOST):
        status: Status = "fail" if frozen == total else "warn"
        summary += ", and a tiny batch cannot be learnt with the rest"
        cause = "optim.frozen-parameters"
        return from_catalogue(STEP, "frozen", status, cause, summary, share, "what should learn requires a gradient")
    return passed(STEP, "frozen", summary, share)


def _reached(look: PassTrace, names: dict[Tensor, str]) -> Check:
    name, expected = "gradient reaches", "every parameter that took part has a gradient"
    if look.loss is None or not look.loss.requires_grad:
        summary = "the loss has no graph: nothing in it depends on a parameter that requires a gradient"
        return from_catalogue(STEP, name, "fail", "optim.detached-graph", summary, 0, expected)
    missing = [parameter for parameter in names if parameter.requires_grad and parameter.grad is None]
    cut = [parameter for parameter in missing if look.ran.get(_owner(names[parameter]), False)]
    trainable = sum(parameter.requires_grad for parameter in names)
    if cut:
        some = _some(names[parameter] for parameter in cut)
        summary = f"{len(cut)} of {trainable} parameters took part and got no gradient: {some}"
        return from_catalogue(STEP, name, "fail", "optim.detached-graph", summary, len(cut), expected)
    unused = sum(parameter.numel() for parameter in missing) / max(1, sum(parameter.numel() for parameter in names))
    if unused > _FEW and not all(_ran_without(look, names[parameter]) for parameter in missing):
        some = _some(names[parameter] for parameter in missing)
        fix = "Use these modules in `forward`, or remove them; in DDP they need `find_unused_parameters=True`."
        return warned(STEP, name, f"{unused:.0%} of the parameters did not take part: {some}", unused, expected, fix)
    return passed(STEP, name, f"{trainable - len(missing)} of {trainable} parameters get a gradient", len(missing))


def _ran_without(look: PassTrace, name: str) -> bool:
    return look.ran.get(_owner(name)) is False


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _in_optimizer(trial: ModelCopy, names: dict[Tensor, str]) -> Check:
    name, expected = "in the optimizer", "every parameter that gets a gradient"
    if trial.optimizer is None:
        return skipped(STEP, name, "no optimizer was given")
    given = {parameter for group in trial.optimizer.param_groups for parameter in group["params"]}
    left_out = [parameter for parameter in names if parameter.grad is not None and parameter not in given]
    if left_out:
        some = _some(names[parameter] for parameter in left_out)
        summary = f"{len(left_out)} of {len(names)} parameters get a gradient and are in no optimizer: {some}"
        if not any(parameter in given for parameter in names):
            summary = f"the optimizer holds {len(given)} parameters, and not one is of this model"
        return from_catalogue(STEP, name, "fail", "optim.parameters-missing", summary, len(left_out), expected)
    return passed(STEP, name, f"the optimizer holds {len(given)} tensors", len(given), expected)


def _registered(trial: ModelCopy, look: PassTrace, names: dict[Tensor, str]) -> Check:
    name, expected = "registered", "0 trained tensors that no module owns"
    groups = [] if trial.optimizer is None else trial.optimizer.param_groups
    known = {*names, *(parameter for group in groups for parameter in group["params"])}
    if isinstance(trial.loss_fn, nn.Module):
        known |= set(trial.loss_fn.parameters())
    strangers = [leaf for leaf in _graph_leaves(look.loss) if leaf not in known]
    if strangers:
        size = sum(leaf.numel() for leaf in strangers)
        shapes = _some(str(tuple(leaf.shape)) for leaf in strangers)
        held = _held_outside(trial.model, strangers)
        summary = (
            f"{len(strangers)} tensors with {size:,} values get a gradient and no module owns them: {shapes}{held}"
        )
        return from_catalogue(STEP, name, "fail", "model.unregistered-parameters", summary, len(strangers), expected)
    return passed(STEP, name, "every tensor that gets a gradient is owned by a module or the optimizer", 0, expected)


def _graph_leaves(loss: Tensor | None) -> Iterator[Tensor]:
    """Every leaf the loss depends on."""
    waiting: list[Any] = [] if loss is None or loss.grad_fn is None else [loss.grad_fn]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        waiting.extend(function for function, _ in node.next_functions)


def _held_outside(model: nn.Module, strangers: list[Tensor]) -> str:
    """Where a module keeps them: the list or dict that should be a `ModuleList` or `ModuleDict`."""
    wanted = set(strangers)
    for path, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute.startswith("_"):
                continue
            for item in leaves(value, (nn.Module, Tensor), deepest=1):
                inside = set(item.parameters()) if isinstance(item, nn.Module) else {item}
                if inside & wanted:
                    return f" (in `{path + '.' if path else ''}{attribute}`)"
    return ""


def _state(trial: ModelCopy) -> Check:
    """After a resume: do the moments belong to these parameters?"""
    name, expected = "optimizer state", "moments with the shape and scale of their gradients"
    if trial.optimizer is None or not trial.optimizer.state:
        return passed(STEP, name, "the optimizer starts without state", 0, expected)
    worst = 1.0
    for parameter, state in trial.optimizer.state.items():
        for key, value in state.items():
            if key in _MOMENTS and isinstance(value, Tensor) and value.shape != parameter.shape:
                summary = f"`{key}` has shape {tuple(value.shape)} and its parameter {tuple(parameter.shape)}"
                return from_catalogue(STEP, name, "fail", "optim.stale-state", summary, None, expected)
        worst = max(worst, _mismatch(parameter, state))
    summary = f"gradients and second moments differ in scale by at most {worst:.3g}"
    if worst > _FAR:
        return from_catalogue(STEP, name, "warn", "optim.stale-state", summary, worst, expected)
    return passed(STEP, name, summary, worst, expected)


def _mismatch(parameter: Tensor, state: Mapping[str, object]) -> float:
    """How many times the fresh gradient exceeds what Adam's second moment remembers."""
    moment, gradient = state.get("exp_avg_sq"), parameter.grad
    if not isinstance(moment, Tensor) or gradient is None or moment.shape != gradient.shape:
        return 1.0
    remembered, fresh = float(moment.float().mean().sqrt()), float(gradient.float().square().mean().sqrt())
    return fresh / remembered if remembered > 0.0 and fresh > 0.0 else 1.0


def _some(names: Any) -> str:
    every = list(names)
    more = f" and {len(every) - 3} more" if len(every) > 3 else ""
    return ", ".join(every[:3]) + more


def backward(look: PassTrace) -> str | None:
    """Run the backward of a look; returns what went wrong, in words."""
    if look.loss is None or not look.loss.requires_grad:
        return None
    try:
        torch.autograd.backward(look.loss)
    except RuntimeError as error:
        return (str(error).splitlines() or [""])[0][:160]
    return None
