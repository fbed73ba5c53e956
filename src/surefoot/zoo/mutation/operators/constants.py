"""Operators that scale a constant: rates, decay, momentum, epsilon, dropout, batch size, initial weights."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from surefoot.zoo.mutation import Operator
from surefoot.zoo.mutation.reading import (
    ADAPTIVE,
    layer_count,
    loop_around,
    model_of,
    optimizer_calls,
    optimizer_statements,
    scheduler_calls,
)
from surefoot.zoo.mutation.source import Edit, keyword, last_name, number

if TYPE_CHECKING:
    from surefoot.zoo.mutation.source import Script


def _rates(script: Script) -> list[ast.expr]:
    """Where learning rates are given: to a one-cycle schedule if there is one, else to the optimizers."""
    cycles = [call for call in scheduler_calls(script) if last_name(call.func) == "OneCycleLR"]
    peaks = [held.value for call in cycles if (held := keyword(call, "max_lr")) is not None]
    if peaks:
        return peaks
    found = []
    for call in optimizer_calls(script):
        groups = [node for node in script.nodes(call) if isinstance(node, ast.Dict)]
        for group in groups:
            pairs = zip(group.keys, group.values, strict=True)
            found += [value for key, value in pairs if isinstance(key, ast.Constant) and key.value == "lr"]
        given = keyword(call, "lr")
        found += [given.value] if given is not None else []
    return found


def _scaled(script: Script, node: ast.expr, factor: float) -> Edit:
    """A constant times a factor; an expression in words, with the factor before it."""
    value = number(node)
    if value is not None:
        return script.replace(node, f"{value * factor:g}")
    return script.replace(node, f"{factor:g} * ({script.words(node)})")


def _scale_rates(script: Script, strength: float) -> list[Edit]:
    return [_scaled(script, rate, strength) for rate in _rates(script)]


def _set_rates(script: Script, strength: float) -> list[Edit]:
    return [script.replace(rate, f"{strength:g}") for rate in _rates(script)]


def _with_setting(script: Script, call: ast.Call, name: str, text: str) -> Edit:
    """A named argument of a call, changed or added."""
    given = keyword(call, name)
    if given is not None:
        return script.replace(given.value, text)
    last = max((*call.args, *call.keywords), key=script.span)
    end = script.span(last)[1]
    return Edit(end, end, f", {name}={text}")


def _set_weight_decay(script: Script, strength: float) -> list[Edit]:
    calls = [call for call in optimizer_calls(script) if model_of(script, call) and last_name(call.func) != "LBFGS"]
    return [_with_setting(script, call, "weight_decay", f"{strength:g}") for call in calls]


def _set_epsilon(script: Script, strength: float) -> list[Edit]:
    calls = [call for call in optimizer_calls(script) if last_name(call.func) in ADAPTIVE]
    return [_with_setting(script, call, "eps", f"{strength:g}") for call in calls]


def _set_momentum(script: Script, strength: float) -> list[Edit]:
    calls = [call for call in optimizer_calls(script) if last_name(call.func) == "SGD"]
    return [_with_setting(script, call, "momentum", f"{strength:g}") for call in calls]


def _set_nesterov(script: Script, strength: float) -> list[Edit]:
    calls = [
        call for call in optimizer_calls(script) if last_name(call.func) == "SGD" and not keyword(call, "nesterov")
    ]
    return [_with_setting(script, call, "momentum", f"{strength:g}, nesterov=True") for call in calls]


def _set_betas(script: Script, strength: float) -> list[Edit]:
    calls = [call for call in optimizer_calls(script) if last_name(call.func) in ADAPTIVE]
    return [_with_setting(script, call, "betas", f"({strength:g}, 0.99)") for call in calls]


def _maximize(script: Script, _: float) -> list[Edit]:
    calls = [call for call in optimizer_calls(script) if last_name(call.func) != "LBFGS"]
    return [_with_setting(script, call, "maximize", "True") for call in calls if len(calls) == 1]


def _change_rates_steadily(script: Script, strength: float) -> list[Edit]:
    """The rates are multiplied before every step."""
    edits = []
    for step in optimizer_statements(script, "step"):
        owner = script.words(step).split(".step(")[0]
        text = f'[group.update(lr={strength:g} * group["lr"]) for group in {owner}.param_groups]'
        edits += [script.before(step, text)] if loop_around(script, step) and not scheduler_calls(script) else []
    return edits


def _set_dropout(script: Script, strength: float) -> list[Edit]:
    calls = [call for call in script.calls("Dropout", "Dropout2d") if call.args and number(call.args[0])]
    return [script.replace(call.args[0], f"{strength:g}") for call in calls]


def _batch_sizes(script: Script) -> list[ast.expr]:
    """The rows of a training batch: of a loader that shuffles, or of a permutation that is split in a loop."""
    loaders = [call for call in script.calls("DataLoader") if keyword(call, "shuffle") is not None]
    found = [held.value for call in loaders if (held := keyword(call, "batch_size")) is not None]
    for call in script.calls("split"):
        base = call.func.value if isinstance(call.func, ast.Attribute) else None
        is_order = isinstance(base, ast.Call) and last_name(base.func) == "randperm"
        if is_order and len(call.args) == 1 and loop_around(script, call):
            found.append(call.args[0])
    return found


def _tiny_batches(script: Script, strength: float) -> list[Edit]:
    if not script.calls("BatchNorm1d", "BatchNorm2d"):
        return []
    return [script.replace(size, f"{strength:g}") for size in _batch_sizes(script)]


def _double_batches(script: Script, _: float) -> list[Edit]:
    return [script.replace(size, f"2 * {script.words(size)}") for size in _batch_sizes(script)]


def _change_parameters(script: Script, condition: str, change: str, part: str = "") -> list[Edit]:
    """A statement that changes the initial parameters, or part of them, in front of the optimizer's construction."""
    for call in optimizer_calls(script):
        model = model_of(script, call)
        if model and layer_count(script) > 1:
            chosen = f"{model}.parameters() if {condition}"
            chosen = f"[p for p in {chosen}]{part}" if part else chosen
            text = f"[p.data.{change} for p in {chosen}]"
            return [script.before(script.statement(call), text)]
    return []


def _scale_weights(script: Script, strength: float) -> list[Edit]:
    return _change_parameters(script, "p.dim() > 1", f"mul_({strength:g})")


def _scale_first_weights(script: Script, strength: float) -> list[Edit]:
    return _change_parameters(script, "p.dim() > 1", f"mul_({strength:g})", part="[:1]")


def _uniform_weights(script: Script, _: float) -> list[Edit]:
    return _change_parameters(script, "p.dim() > 1", "uniform_()")


def _equal_rows(script: Script, _: float) -> list[Edit]:
    return _change_parameters(script, "p.dim() > 1", "copy_(p.data[:1].clone())")


def _equal_weights(script: Script, _: float) -> list[Edit]:
    return _change_parameters(script, "p.dim() > 1", "fill_(0.02)")


def _negative_biases(script: Script, strength: float) -> list[Edit]:
    rectified = script.calls("ReLU", "relu")
    return _change_parameters(script, "p.dim() == 1", f"fill_({strength:g})") if rectified else []


_DURATIONS = ("step_size", "T_max", "T_0", "total_iters", "total_steps")


def _shorten_schedule(script: Script, strength: float) -> list[Edit]:
    edits = []
    for call in scheduler_calls(script):
        for name in _DURATIONS:
            given = keyword(call, name)
            if given is not None:
                edits.append(script.replace(given.value, f"max(1, int({strength:g} * {script.words(given.value)}))"))
    return edits


OPERATORS = (
    Operator(
        *("raise-lr", "the learning rate is multiplied", "learning rate that is given by name"),
        ("lr.too-high",),
        _scale_rates,
        strengths=(10.0, 100.0, 1000.0),
    ),
    Operator(
        *("lower-lr", "the learning rate is multiplied", "learning rate that is given by name"),
        ("lr.too-low",),
        _scale_rates,
        strengths=(0.1, 0.01, 0.0001, 0.0),
    ),
    Operator(
        *("fine-tuning-rate", "a learning rate of this size", "learning rate that is given by name"),
        ("lr.too-low",),
        _set_rates,
        strengths=(1e-4, 1e-5),
    ),
    Operator(
        *("raise-weight-decay", "weight decay of this size", "optimizer over `model.parameters()`"),
        ("optim.weight-decay",),
        _set_weight_decay,
        strengths=(0.1, 1.0, 10.0),
    ),
    Operator(
        *("raise-epsilon", "epsilon of this size", "optimizer of the Adam family"),
        ("optim.epsilon",),
        _set_epsilon,
        strengths=(0.01, 1.0, 100.0),
    ),
    Operator(
        *("raise-momentum", "momentum of this size", "SGD"),
        ("lr.too-high",),
        _set_momentum,
        strengths=(0.98, 0.999),
    ),
    Operator(
        *("heavy-nesterov", "Nesterov momentum of this size", "SGD"),
        ("lr.too-high",),
        _set_nesterov,
        strengths=(0.99, 0.998),
    ),
    Operator(
        *("change-betas", "the first beta has this size", "optimizer of the Adam family"),
        ("lr.too-high", "lr.too-low"),
        _set_betas,
        strengths=(0.5, 0.999),
    ),
    Operator(
        *("maximize", "the optimizer ascends", "one optimizer"),
        ("loss.sign-flipped",),
        _maximize,
        "by construction",
    ),
    Operator(
        *("grow-lr", "the learning rate is multiplied at every step", "optimizer without a schedule"),
        ("lr.schedule-broken", "lr.too-high"),
        _change_rates_steadily,
        strengths=(1.02, 1.1),
    ),
    Operator(
        *("decay-lr", "the learning rate is multiplied at every step", "optimizer without a schedule"),
        ("lr.schedule-broken", "lr.too-low"),
        _change_rates_steadily,
        strengths=(0.95, 0.7),
    ),
    Operator(
        *("raise-dropout", "dropout of this share", "dropout with a written rate"),
        ("optim.not-learning",),
        _set_dropout,
        strengths=(0.9, 0.99),
    ),
    Operator(
        *("tiny-batches", "batches of so many rows", "BatchNorm and a written batch size"),
        ("model.batchnorm-tiny-batch",),
        _tiny_batches,
        strengths=(2.0, 3.0),
    ),
    Operator(
        *("double-batches", "batches of twice the rows", "written batch size"),
        (),
        _double_batches,
        "harmless",
    ),
    Operator(
        *("enlarge-init", "initial weights are multiplied", "optimizer over the parameters of several layers"),
        ("init.too-large",),
        _scale_weights,
        strengths=(5.0, 30.0),
    ),
    Operator(
        *("enlarge-first-layer", "the first matrix is multiplied", "optimizer over the parameters of several layers"),
        ("init.too-large",),
        _scale_first_weights,
        strengths=(5.0, 30.0),
    ),
    Operator(
        *("uniform-init", "initial weights from 0 to 1", "optimizer over the parameters of several layers"),
        ("init.too-large",),
        _uniform_weights,
    ),
    Operator(
        *("shrink-init", "initial weights are multiplied", "optimizer over the parameters of several layers"),
        ("init.too-small",),
        _scale_weights,
        strengths=(0.1, 0.001),
    ),
    Operator(
        *("equal-init", "all initial weights are equal", "optimizer over the parameters of several layers"),
        ("init.symmetric",),
        _equal_weights,
    ),
    Operator(
        *("equal-rows", "all rows of a matrix are equal", "optimizer over the parameters of several layers"),
        ("init.symmetric",),
        _equal_rows,
    ),
    Operator(
        *("negative-biases", "all initial biases have this value", "ReLU in a model of several layers"),
        ("model.dead-units",),
        _negative_biases,
        strengths=(-1.0, -10.0),
    ),
    Operator(
        *("shorten-schedule", "the schedule's length is multiplied", "schedule with a written length"),
        ("lr.schedule-broken", "lr.too-low"),
        _shorten_schedule,
        strengths=(0.25, 0.05),
    ),
)
