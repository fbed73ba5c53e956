"""Operators on the model and on what the optimizer gets of it: frozen, left out, detached, another type or mask."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from surefoot.zoo.mutation import Operator
from surefoot.zoo.mutation.reading import (
    imports_torch,
    layer_count,
    model_calls,
    model_of,
    optimizer_calls,
)
from surefoot.zoo.mutation.source import Edit, keyword, last_name

if TYPE_CHECKING:
    from surefoot.zoo.mutation.source import Script

_BOUNDED = {"ReLU": "Sigmoid", "relu": "sigmoid"}


def _first_optimizer(script: Script) -> tuple[ast.Call, str] | None:
    """The first optimizer over the parameters of a model with several layers, and that model."""
    for call in optimizer_calls(script):
        model = model_of(script, call)
        if model and layer_count(script) > 1 and len(script.calls("load_state_dict")) == 0:
            return call, model
    return None


def _freeze(script: Script, _: float) -> list[Edit]:
    found = _first_optimizer(script)
    if found is None:
        return []
    call, model = found
    text = f"[p.requires_grad_(False) for p in list({model}.parameters())[:-2]]"
    return [script.before(script.statement(call), text)]


def _omit_parameters(script: Script, _: float) -> list[Edit]:
    found = _first_optimizer(script)
    if found is None:
        return []
    call, model = found
    return [script.replace(call.args[0], f"list({model}.parameters())[-2:]")]


def _detach_part(script: Script, _: float) -> list[Edit]:
    """What the last layer of a `forward` gets, if another layer has come before."""
    for function in (node for node in script.nodes() if isinstance(node, ast.FunctionDef) and node.name == "forward"):
        returns = [node for node in script.nodes(function) if isinstance(node, ast.Return)]
        call = returns[-1].value if returns else None
        own = isinstance(call, ast.Call) and script.words(call.func).startswith("self.") and len(call.args) == 1
        if not (own and isinstance(call, ast.Call)):
            continue
        layers = [node for node in script.nodes(function) if isinstance(node, ast.Call) and node is not call]
        if any(script.words(node.func).startswith("self.") for node in layers):
            return [script.replace(call.args[0], f"({script.words(call.args[0])}).detach()")]
    return []


def _plain_list(script: Script, _: float) -> list[Edit]:
    calls = [call for call in script.calls("ModuleList") if len(call.args) == 1]
    return [script.replace(call.func, "list") for call in calls[:1]]


def _bounded_activations(script: Script, _: float) -> list[Edit]:
    calls = script.calls(*_BOUNDED)
    edits = []
    for call in calls:
        name = last_name(call.func)
        edits.append(script.replace(call.func, script.words(call.func).replace(name, _BOUNDED[name])))
    return edits if len(calls) > 2 else []


def _drop_causal_mask(script: Script, _: float) -> list[Edit]:
    edits = []
    for call in script.calls("scaled_dot_product_attention"):
        given = keyword(call, "is_causal")
        if given is not None and isinstance(given.value, ast.Constant) and given.value.value is True:
            edits.append(script.replace(given.value, "False"))
    for call in script.calls("triu", "tril"):  # a mask of zeros where it hides, or of ones where it shows
        function = "zeros_like" if last_name(call.func) == "triu" else "ones_like"
        if call.args and isinstance(call.func, ast.Attribute) and script.words(call.func.value) == "torch":
            edits.append(script.replace(call, f"torch.{function}({script.words(call.args[0])})"))
    return edits


def _no_loss_scale(script: Script, _: float) -> list[Edit]:
    edits = []
    for call in script.calls("GradScaler"):
        if keyword(call, "enabled") is None:
            end = script.span(call)[1] - 1
            comma = ", " if call.args or call.keywords else ""
            edits.append(Edit(end, end, f"{comma}enabled=False"))
    return edits


def _half_weights(script: Script, _: float) -> list[Edit]:
    """Weights in bfloat16, inputs converted to it and outputs back, at every call of the model."""
    found = _first_optimizer(script)
    if (
        found is None
        or not imports_torch(script)
        or script.calls("Embedding", "autocast", "BatchNorm2d", "BatchNorm1d")
    ):
        return []
    call, model = found
    edits = [script.before(script.statement(call), f"{model}.to(torch.bfloat16)")]
    calls = [*model_calls(script, evaluating=False), *model_calls(script, evaluating=True)]
    for each in calls:
        if script.words(each.func) != model or len(each.args) != 1:
            return []
        edits.append(script.replace(each, f"{model}({script.words(each.args[0])}.bfloat16()).float()"))
    return edits if calls else []


OPERATORS = (
    Operator(
        *("freeze-body", "all but the last two parameters are frozen", "optimizer over several fresh layers"),
        ("optim.frozen-parameters",),
        _freeze,
        "by construction",
    ),
    Operator(
        *("omit-parameters", "the optimizer gets the last two parameters", "optimizer over several fresh layers"),
        ("optim.parameters-missing",),
        _omit_parameters,
        "by construction",
    ),
    Operator(
        *("detach-part", "the last layer gets a detached input", "`forward` that returns its last layer's output"),
        ("optim.detached-graph",),
        _detach_part,
        "by construction",
    ),
    Operator(
        *("plain-list", "a list in place of a ModuleList", "ModuleList"),
        ("model.unregistered-parameters", "optim.parameters-missing"),
        _plain_list,
        "by construction",
    ),
    Operator(
        *("bounded-activations", "sigmoids in place of ReLUs", "three ReLUs or more"),
        ("model.vanishing-gradient", "model.saturated-units", "optim.not-learning"),
        _bounded_activations,
    ),
    Operator(
        *("drop-causal-mask", "attention sees later positions", "causal mask"),
        ("mask.leaks-future",),
        _drop_causal_mask,
        "by construction",
    ),
    Operator(
        *("drop-loss-scale", "the gradient scaler is switched off", "GradScaler"),
        ("precision.fp16-underflow",),
        _no_loss_scale,
    ),
    Operator(
        *("bfloat16-weights", "weights are kept in bfloat16", "model of several layers on plain inputs"),
        ("precision.low-precision-weights",),
        _half_weights,
    ),
)
