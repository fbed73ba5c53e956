"""`init_for(model)`: look at the model, choose a recipe per parameter, write it, and say what was done and why.

How it decides what surrounds a layer: `trace` (with an example input) or `guess` (without). What it does about it:
`rules`. What it keeps its hands off: parameters that are frozen, that `only` and `skip` exclude, that have no rule, and
that do not look like PyTorch's own default draw, because then somebody loaded, trained or set them (`fresh`).

Left out: sharded tensors (initialise first, then wrap in FSDP) and lazy modules before their first forward.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from surefoot.build.init.calibrate import rescale
from surefoot.build.init.fresh import looks_fresh
from surefoot.build.init.guess import guess
from surefoot.build.init.rules import Rule, is_weight_norm, left, rule_for, weight_norm_rule, with_orthogonal_directions
from surefoot.build.init.trace import Trace, trace
from surefoot.build.tables import text_table

Patterns = str | Iterable[str]


@dataclass(frozen=True)
class InitRow:
    """What was done to one parameter."""

    name: str
    """Its name in the model; of a tied parameter, the first one."""

    shape: tuple[int, ...]
    """Its shape."""

    recipe: str
    """The recipe, or `left` when the parameter was not written."""

    std: float | None
    """The standard deviation asked for, where the recipe has one."""

    why: str
    """What was seen that led to it."""


@dataclass(frozen=True)
class InitReport:
    """What `init_for` did, or in a dry run would do; prints as a table."""

    rows: tuple[InitRow, ...]
    """One row per parameter, in the model's order."""

    @property
    def written(self) -> tuple[InitRow, ...]:
        """The parameters that got a value."""
        return tuple(row for row in self.rows if row.recipe != "left")

    @property
    def left(self) -> tuple[InitRow, ...]:
        """The parameters that kept theirs."""
        return tuple(row for row in self.rows if row.recipe == "left")

    def __getitem__(self, name: str) -> InitRow:
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(f"No parameter is called {name!r}; the names are {[row.name for row in self.rows]}.")

    def __str__(self) -> str:
        cells = [
            (row.name, "×".join(map(str, row.shape)), row.recipe, "" if row.std is None else f"{row.std:.4g}", row.why)
            for row in self.rows
        ]
        summary = f"{len(self.written)} parameters initialised, {len(self.left)} left as they were"
        return text_table(("parameter", "shape", "recipe", "std", "why"), cells) + "\n" + summary


@dataclass(frozen=True)
class _Entry:
    """One distinct parameter, where it sits, and every name it has."""

    parameter: Tensor
    names: tuple[str, ...]
    module_name: str
    module: nn.Module
    attribute: str
    tied_embedding: bool


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
    """Initialise `model` by what it is made of, and return the table of what was done to which parameter and why.

    Args:
        model: The model; its parameters are written in place, so tied weights stay tied.
        example: An input to trace (a tensor, a tuple of arguments, or a dict of keyword arguments). It shows functional
            activations and residual branches that the list of modules does not. The trace leaves no mark.
        only: Names or patterns (`"head"`, `"blocks.*.mlp"`) of what may be written; everything else is left.
        skip: Names or patterns of what must be left.
        overwrite: Also write parameters that do not look like PyTorch's default, and so were loaded, trained or set.
        calibrate: Take `example` for real, standardised data: draw the layers before ReLU, GELU or SiLU with orthogonal
            directions and rescale each until its output on `example` has the variance its recipe aims at. Worth it for
            deep convolutional networks without norms.
        dry_run: Print the table, write nothing, and draw no random number.
        generator: Draws from this instead of the global stream.
    """
    if calibrate and example is None:
        raise ValueError("`calibrate=True` measures layers on real data; got no `example`. Give a batch of it.")
    model = getattr(model, "_orig_mod", model)  # look inside torch.compile
    _refuse_lazy(model)
    entries = _entries(model)
    allowed = _selected(entries, only, skip)
    found = guess(model) if example is None else trace(model, example)
    modules = dict(model.named_modules())
    rows, aims = [], dict[Tensor, float]()
    for entry in entries:
        rule = _decide(entry, modules, found, allowed=entry.names[0] in allowed, overwrite=overwrite)
        if calibrate and rule.aim is not None:
            aims[entry.parameter] = rule.aim
            rule = with_orthogonal_directions(rule)
        if rule.fill is not None and not dry_run:
            _write(entry, rule.fill, modules, generator)
        also = f" (tied: {', '.join(entry.names[1:])})" if len(entry.names) > 1 else ""
        rows.append(InitRow(entry.names[0], tuple(entry.parameter.shape), rule.recipe, rule.std, rule.why + also))
    if calibrate and not dry_run:
        rescale(model, example, aims)
    report = InitReport(tuple(rows))
    if dry_run:
        print(report)
    return report


def _entries(model: nn.Module) -> list[_Entry]:
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
        entries.append(_Entry(parameter, names, module_name, module, attribute, tied_embedding))
    return entries


def _decide(entry: _Entry, modules: dict[str, nn.Module], found: Trace, *, allowed: bool, overwrite: bool) -> Rule:
    if not allowed:
        return left("excluded by `only` or `skip`")
    if not entry.parameter.requires_grad:
        return left("frozen: requires_grad is False")
    rule, value = _rule_and_value(entry, modules, found)
    if rule.fill is None or overwrite or value.is_meta:
        return rule
    if not any(looks_fresh(value, default) for default in rule.defaults):
        return left("not PyTorch's default draw, so loaded, trained or set by hand (`overwrite=True` writes it)")
    return rule


def _rule_and_value(entry: _Entry, modules: dict[str, nn.Module], found: Trace) -> tuple[Rule, Tensor]:
    if not is_weight_norm(entry.module):
        rule = rule_for(entry.module, entry.attribute, entry.parameter, found=found, tied=entry.tied_embedding)
        return rule, entry.parameter
    parent, attribute = _behind_weight_norm(entry, modules)
    if entry.attribute == "original0":
        return left("length under weight_norm: follows from its direction, original1"), entry.parameter
    return weight_norm_rule(parent, attribute, found), getattr(parent, attribute)


def _behind_weight_norm(entry: _Entry, modules: dict[str, nn.Module]) -> tuple[nn.Module, str]:
    parent, _, attribute = entry.module_name.rpartition("parametrizations.")
    return modules[parent.rstrip(".")], attribute


def _write(
    entry: _Entry,
    fill: Callable[[Tensor, torch.Generator | None], object],
    modules: dict[str, nn.Module],
    generator: torch.Generator | None,
) -> None:
    if entry.parameter.is_meta:
        raise ValueError(
            f"{entry.names[0]} is on the meta device and has no memory to write. Call "
            "`model.to_empty(device=...)` first; `dry_run=True` shows the table without memory."
        )
    if not is_weight_norm(entry.module):
        fill(entry.parameter, generator)
        return
    parent, attribute = _behind_weight_norm(entry, modules)
    value = torch.empty_like(getattr(parent, attribute), requires_grad=False)
    fill(value, generator)
    setattr(parent, attribute, value)  # the parametrization splits it into length and direction


def _refuse_lazy(model: nn.Module) -> None:
    lazy = [name for name, parameter in model.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise ValueError(
            f"{', '.join(lazy)} have no shape yet (lazy modules). Run one forward on a real batch, then `init_for`."
        )


def _selected(entries: list[_Entry], only: Patterns | None, skip: Patterns) -> set[str]:
    chosen = {entry.names[0] for entry in entries} if only is None else _matching(entries, only, "only")
    return chosen - _matching(entries, skip, "skip")


def _matching(entries: list[_Entry], patterns: Patterns, argument: str) -> set[str]:
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
