"""`init_for(model)`: inspect the model, choose a recipe per parameter, apply it, and report what was done and why.

How it decides what surrounds a layer: `trace` (with an example input) or `guess` (without). What it does about it:
`rules`. What it leaves unchanged: parameters that are frozen, that `only` and `skip` exclude, that have no rule, and
those of modules that do not look as PyTorch made them, because then they were loaded, trained or set (`fresh`).

Not covered: sharded tensors (initialise first, then wrap in FSDP) and lazy modules before their first forward.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from surefoot.build.init.fresh import Freshness, freshness
from surefoot.build.init.guess import guess
from surefoot.build.init.report import InitReport, InitRow
from surefoot.build.init.rules import (
    InitRule,
    is_weight_norm,
    left,
    rule_for,
    weight_norm_rule,
    with_orthogonal_directions,
)
from surefoot.build.init.trace import Trace, call, trace
from surefoot.core.save_restore import untouched
from surefoot.core.settings import require_module

Patterns = str | Iterable[str]


@dataclass(frozen=True)
class ParameterEntry:
    """One distinct parameter, where it sits, and every name it has."""

    parameter: Tensor
    names: tuple[str, ...]
    module_name: str
    module: nn.Module
    attribute: str
    tied_embedding: bool


def entries_of(model: nn.Module) -> list[ParameterEntry]:
    """List the distinct parameters; one that an embedding shares counts as the embedding's."""
    owners: dict[Tensor, list[tuple[str, nn.Module, str]]] = {}
    for module_name, module in model.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(parameter, []).append((module_name, module, attribute))
    entries = []
    for parameter, places in owners.items():
        embeddings = [place for place in places if isinstance(place[1], nn.Embedding | nn.EmbeddingBag)]
        module_name, module, attribute = (embeddings or places)[0]
        names = tuple(f"{prefix}.{last}" if prefix else last for prefix, _, last in places)
        tied_embedding = bool(embeddings) and len(embeddings) < len(places)
        entries.append(ParameterEntry(parameter, names, module_name, module, attribute, tied_embedding))
    return entries


def refuse_lazy(model: nn.Module) -> None:
    """Raise when a parameter has no shape yet."""
    lazy = [name for name, parameter in model.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise ValueError(
            f"{', '.join(lazy)} have no shape yet (lazy modules). Run one forward on a real batch, then `init_for`."
        )


def selected(entries: list[ParameterEntry], only: Patterns | None, skip: Patterns) -> set[str]:
    """Give the first names of the parameters that may be written."""
    chosen = {entry.names[0] for entry in entries} if only is None else _matching(entries, only, "only")
    return chosen - _matching(entries, skip, "skip")


def _matching(entries: list[ParameterEntry], patterns: Patterns, argument: str) -> set[str]:
    chosen = set[str]()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        hits = {entry.names[0] for entry in entries if any(_names(pattern, name) for name in entry.names)}
        if not hits:
            raise ValueError(
                f"`{argument}` has {pattern!r}, which matches no parameter. Expected a parameter, a module or a "
                f"pattern such as 'encoder' or 'blocks.*.mlp'; the first names are {[e.names[0] for e in entries[:5]]}."
            )
        chosen |= hits
    return chosen


def _names(pattern: str, name: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def init_for(
    model: nn.Module,
    example: Any = None,
    *,
    only: Patterns | None = None,
    skip: Patterns = (),
    overwrite: bool = False,
    calibrate: bool = False,
    dry_run: bool = False,
    generator: torch.Generator | None = None,
) -> InitReport:
    """Initialise `model` according to its structure, and return a table of what was done to each parameter, and why.

    Args:
        model: The model; its parameters are written in place, so tied weights stay tied.
        example: An input to trace (a tensor, a tuple of arguments, or a dict of keyword arguments). It shows functional
            activations and residual branches that the list of modules does not. The trace changes nothing.
        only: Names or patterns (`"head"`, `"blocks.*.mlp"`) of what may be written; everything else is left.
        skip: Names or patterns of what must be left.
        overwrite: Also write parameters that do not look like PyTorch's default, and so were loaded, trained or set.
        calibrate: Treat `example` as real, standardised data: draw the layers before ReLU, GELU or SiLU with orthogonal
            directions and rescale each until its output on `example` has the variance its recipe aims at. Worth it for
            deep convolutional networks without norms.
        dry_run: Print the table, write nothing, and draw no random number.
        generator: Draws from this instead of the global stream.
    """
    require_module(model)
    if calibrate and example is None:
        raise ValueError("`calibrate=True` measures layers on real data; got no `example`. Pass a batch.")
    model = getattr(model, "_orig_mod", model)  # look inside torch.compile
    refuse_lazy(model)
    entries = entries_of(model)
    allowed = selected(entries, only, skip)
    found = guess(model) if example is None else trace(model, example)
    modules = dict(model.named_modules())
    plan = [(entry, _decide(entry, modules, found, allowed=entry.names[0] in allowed)) for entry in entries]
    if not overwrite:
        plan = _keep_set_values(plan, modules, named_by_user=only is not None)
    if not dry_run:
        aims = _write_all(plan, modules, generator, calibrate)
        if aims:
            rescale(model, example, aims)
    report = InitReport(tuple(_row(entry, rule) for entry, rule in plan))
    if dry_run:
        print(report)
    return report


def _write_all(
    plan: list[tuple[ParameterEntry, InitRule]],
    modules: dict[str, nn.Module],
    generator: torch.Generator | None,
    calibrate: bool,
) -> dict[Tensor, float]:
    """Apply the plan; returns the target scale of each calibrated parameter's output."""
    aims: dict[Tensor, float] = {}
    for entry, rule in plan:
        if rule.fill is None:
            continue
        if calibrate and rule.aim is not None:
            aims[entry.parameter] = rule.aim
            rule = with_orthogonal_directions(rule)
        _write(entry, rule, modules, generator)
    return aims


def _row(entry: ParameterEntry, rule: InitRule) -> InitRow:
    also = f" (tied: {', '.join(entry.names[1:])})" if len(entry.names) > 1 else ""
    return InitRow(entry.names[0], tuple(entry.parameter.shape), rule.recipe, rule.std, rule.why + also)


def _decide(entry: ParameterEntry, modules: dict[str, nn.Module], found: Trace, *, allowed: bool) -> InitRule:
    if not allowed:
        return left("excluded by `only` or `skip`")
    if not entry.parameter.requires_grad:
        return left("frozen: requires_grad is False")
    if not is_weight_norm(entry.module):
        return rule_for(entry.module, entry.attribute, entry.parameter, found=found, tied=entry.tied_embedding)
    if entry.attribute == "original0":
        return left("length under weight_norm: follows from its direction, original1")
    return weight_norm_rule(*_behind_weight_norm(entry, modules), found)


def _keep_set_values(
    plan: list[tuple[ParameterEntry, InitRule]], modules: dict[str, nn.Module], *, named_by_user: bool
) -> list[tuple[ParameterEntry, InitRule]]:
    """Turn the rule into `left` for every parameter of a module that was loaded, trained or set by hand.

    A module is judged as a whole: a short bias alone says nothing. If other modules were set, one that is too small or
    too smooth to judge is left unchanged too, unless the user named what to write: keeping fresh values is harmless,
    losing trained ones is not.
    """
    verdicts: dict[str, Freshness] = {}
    for entry, rule in plan:
        if rule.fill is not None and not entry.parameter.is_meta:
            verdict = freshness(_value(entry, modules), rule.defaults)
            verdicts[entry.module_name] = verdict.joined(verdicts.get(entry.module_name))
    some_were_set = Freshness.SET in verdicts.values()

    def spared(entry: ParameterEntry, rule: InitRule) -> InitRule:
        verdict = verdicts.get(entry.module_name)
        if rule.fill is None or verdict in (None, Freshness.FRESH):
            return rule
        if verdict is Freshness.SET:
            return left("not PyTorch's default draw, so loaded, trained or set by hand (`overwrite=True` writes it)")
        if some_were_set and not named_by_user:
            return left(
                "other modules were loaded or trained, and this one cannot be distinguished (name it in `only`)"
            )
        return rule

    return [(entry, spared(entry, rule)) for entry, rule in plan]


def _value(entry: ParameterEntry, modules: dict[str, nn.Module]) -> Tensor:
    if not is_weight_norm(entry.module):
        return entry.parameter
    parent, attribute = _behind_weight_norm(entry, modules)
    value: Tensor = getattr(parent, attribute)
    return value


def _behind_weight_norm(entry: ParameterEntry, modules: dict[str, nn.Module]) -> tuple[nn.Module, str]:
    parent, _, attribute = entry.module_name.rpartition("parametrizations.")
    return modules[parent.rstrip(".")], attribute


def _write(
    entry: ParameterEntry, rule: InitRule, modules: dict[str, nn.Module], generator: torch.Generator | None
) -> None:
    if entry.parameter.is_meta:
        raise ValueError(
            f"{entry.names[0]} is on the meta device and has no memory to write. Call "
            "`model.to_empty(device=...)` first; `dry_run=True` shows the table without memory."
        )
    assert rule.fill is not None
    if not is_weight_norm(entry.module):
        rule.fill(entry.parameter, generator)
        return
    parent, attribute = _behind_weight_norm(entry, modules)
    value = torch.empty_like(getattr(parent, attribute), requires_grad=False)
    rule.fill(value, generator)
    setattr(parent, attribute, value)  # the parametrization splits it into length and direction


def rescale(model: nn.Module, example: Any, aims: Mapping[Tensor, float]) -> None:
    """Multiply each weight in `aims` so that its layer's output on `example` has that second moment.

    A recipe is right on average over draws. In a deep plain network with few channels one draw can be far from the
    average, since deviations multiply from layer to layer, and zero padding takes a little at every border. So one
    forward measures the second moment of each layer's output and rescales its weight on the way (layer-sequential
    unit-variance, Mishkin and Matas 2016, arXiv:1511.06422, with each recipe's own aim in place of one).

    Not covered: layers whose weight is used several times or has a parametrization, and the backward pass, where the
    deviation of a narrow network stays.
    """
    factors: dict[Tensor, float] = {}

    def adjust(module: nn.Module, _: Any, output: Tensor) -> Tensor:
        weight, bias = module._parameters["weight"], module._parameters.get("bias")
        if weight is None or weight in factors:
            return output
        shift = torch.zeros(()) if bias is None else _beside_channels(bias, weight)
        signal = (output - shift.to(output)).double()
        moment, spent = float(signal.square().mean()), float(shift.double().square().mean())
        if not math.isfinite(moment) or moment <= 0.0 or spent >= aims[weight]:
            return output
        factors[weight] = math.sqrt((aims[weight] - spent) / moment)
        return (signal * factors[weight]).to(output) + shift.to(output)

    handles = [
        module.register_forward_hook(adjust)
        for module in model.modules()
        if module._parameters.get("weight") is not None and module._parameters["weight"] in aims
    ]
    try:
        with untouched(model), torch.no_grad():
            model.eval()
            call(model, example)
    finally:
        for handle in handles:
            handle.remove()
    with torch.no_grad():
        for weight, factor in factors.items():
            weight.mul_(factor)


def _beside_channels(bias: Tensor, weight: Tensor) -> Tensor:
    """Shape a bias to add to the output of its layer; a convolution's channels come before its positions."""
    return bias.detach().view(-1, *[1] * (weight.ndim - 2))
