"""The models and parameters of a script, with the names that its author gave them."""

from __future__ import annotations

import math
import weakref
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from surefoot.core.user_code import variables
from surefoot.core.without_hooks import WithoutHooks
from surefoot.observe.readable import is_sharded, readable
from surefoot.record.facts import ModelFacts, ModuleFacts, ParameterFacts, WeightScale
from surefoot.watch.deferred import Count, Lost, later, number, read
from surefoot.watch.tensor_summary import norms, real, sampled
from surefoot.watch.user_frames import name_of, user_frame

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


_REDUCED = (torch.float32, torch.bfloat16, torch.float16)
"""Types of weights that are measured without conversion."""


class PassedPoint(NamedTuple):
    """Some values of a parameter at a sampled step, and their gradient."""

    step: int
    values: Tensor
    gradient: Tensor


@dataclass
class Parameter:
    """One leaf tensor that is, or should be, learned."""

    id: int
    tensor: Callable[[], Tensor | None]
    shape: list[int]
    dtype: str
    name: str = ""
    model: str = ""
    module_type: str = ""
    registered: bool = True
    """Whether a called module owns it as a regular parameter."""
    optimizers: set[int] = field(default_factory=set)
    trained_by: dict[int, Count] = field(default_factory=dict)
    """The number of changes made by each optimizer."""
    loaded: bool = False
    rewritten: Count = field(default_factory=Count)
    """Whether other values were put into it between registration and its first update."""
    requires_grad: bool = True
    first: WeightScale = field(default_factory=WeightScale)
    last: WeightScale = field(default_factory=WeightScale)
    sampled: int = 0
    """The number of sampled steps in which an optimizer held it."""
    in_graph: int = 0
    used: int = 0
    """The number of sampled steps in which its module ran with gradients enabled, or an operation took it."""
    with_grad: int = 0
    zero_grad: Count = field(default_factory=Count)
    is_compared: bool = False
    """Whether a step was observed for which it is, or will be, known whether it changed this parameter."""
    changed: Count = field(default_factory=Count)
    unchanged: Count = field(default_factory=Count)
    moved_alone: Count = field(default_factory=Count)
    """The number of sampled steps between which it changed although no optimizer holds it."""
    moves: list[float] = field(default_factory=list)
    """The size of each change as a share of its norm; the numbers may be read later."""
    along: list[float] = field(default_factory=list)
    """The cosine between each change and the gradient before it, where that is known; read later, too."""
    sample: Tensor | None = None
    """Some of its values in the last sampled step, kept only while no optimizer holds it."""
    gradient: Tensor | None = None
    """The gradient of the same values after that step's backward, in a loop without an optimizer."""
    passed: PassedPoint | None = None
    """Where it was in the last sampled step in which an optimizer held it."""

    def as_facts(self, label: str) -> ParameterFacts:
        """All facts; `label` is its name, prefixed with its model where needed."""
        return ParameterFacts.from_record(
            self,
            optimizers=sorted(self.optimizers),
            trained_by=sorted(number for number, times in self.trained_by.items() if times.value),
            rewritten=self.rewritten.value > 0,
            first=_scale(self.first),
            last=_scale(self.last),
            zero_grad=self.zero_grad.value,
            changed=self.changed.value,
            unchanged=self.unchanged.value,
            moved_alone=self.moved_alone.value,
            moves=_known(self.moves),
            along=_known(self.along),
            label=label,
        )


def _known(numbers: list[float]) -> list[float]:
    """The numbers that could be read and are finite."""
    found = []
    for each in numbers:
        with suppress(Lost):
            found.append(read(each))
    return [value for value in found if math.isfinite(value)]


def _scale(facts: WeightScale) -> WeightScale:
    try:
        return read(facts)
    except Lost:
        return WeightScale()


def weight_facts(tensors: list[Tensor]) -> list[WeightScale]:
    """The scale of each weight, and whether its rows are all equal. For a sharded weight, of its local part.

    No weight is copied as a whole, except for those of types that torch has no reductions for.
    """
    with WithoutHooks():
        held = [local if local is None else local.detach() for local in map(readable, tensors)]
        plain = [
            torch.empty(0) if local is None else local if local.dtype in _REDUCED else real(local).float()
            for local in held
        ]
        sizes, largest = norms(plain), norms(plain, math.inf)
        return [
            WeightScale() if local is None else _with_rows(WeightScale(norm=size, largest=most), values)
            for local, values, size, most in zip(held, plain, sizes, largest, strict=True)
        ]


def _with_rows(scale: WeightScale, values: Tensor) -> WeightScale:
    if values.dim() < 2 or values.shape[0] <= 1 or not values.numel():
        return scale
    low, high = torch.aminmax(values, dim=0)
    return replace(
        scale,
        std=number((values if values.dtype is torch.float32 else sampled(values).float()).std(correction=0)),
        fan_in=values.numel() // len(values),
        rows_equal=number((low == high).all()),
        row_range=number(torch.linalg.vector_norm(high.float() - low.float())),
    )


def _no_tensor() -> None:
    """Replaces a weak reference that was dropped."""


class ParameterRegistry:
    """Every known parameter, by identity; held weakly."""

    def __init__(self) -> None:
        self.parameters: list[Parameter] = []
        self._owners: set[str] = set()
        """The models that have parameters."""
        self.models: list[ModelFacts] = []
        self._ids: dict[int, int] = {}
        self._models: list[tuple[weakref.ref[nn.Module], str]] = []
        self._sharded: dict[tuple[int, str], int] = {}
        """The numbers of sharded parameters, by the identity of their module and their name in it."""
        self._gathered: dict[int, weakref.ref[Tensor]] = {}
        """The tensors that replace them while their module runs."""

    def id_of(self, tensor: Tensor) -> int | None:
        """The number of a known parameter."""
        number = self._ids.get(id(tensor))
        if number is None or self.parameters[number].tensor() is tensor:
            return number
        gathered = self._gathered.get(number)
        return number if gathered is not None and gathered() is tensor else None

    def get(self, tensor: Tensor) -> Parameter | None:
        """The record of a known parameter."""
        number = self.id_of(tensor)
        return None if number is None else self.parameters[number]

    def add(self, tensor: Tensor) -> Parameter:
        """The record of a parameter, which is created if it is new."""
        known = self.get(tensor)
        if known is not None:
            return known
        record = Parameter(
            id=len(self.parameters),
            tensor=weakref.ref(tensor),
            shape=[] if is_lazy(tensor) else list(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            requires_grad=tensor.requires_grad,
        )
        record.first = weight_facts([tensor])[0]
        self.parameters.append(record)
        self._ids[id(tensor)] = record.id
        return record

    def drop_references(self, tensors: Iterable[Tensor]) -> list[tuple[Parameter, Tensor]]:
        """Drop the weak references to parameters until `add_references`: torch does not swap tensors that have one."""
        held = []
        for tensor in tensors:
            record = self.get(tensor)
            if record is not None and record.tensor() is tensor:
                record.tensor = _no_tensor
                held.append((record, tensor))
        return held

    def add_references(self, held: list[tuple[Parameter, Tensor]]) -> None:
        """Create weak references to the parameters again."""
        for record, tensor in held:
            record.tensor = weakref.ref(tensor)

    def measure_again(self, seen: list[tuple[Parameter, Tensor]]) -> None:
        """Measure parameters again before their first update: they may have been reinitialised, loaded or converted."""
        for (record, tensor), now in zip(seen, weight_facts([tensor for _, tensor in seen]), strict=True):
            record.shape, record.dtype = list(tensor.shape), str(tensor.dtype).removeprefix("torch.")
            before, record.first = record.first, now
            if before.norm is not None:
                record.rewritten.add(later(_is_other, before.norm, now.norm))

    def models_now(self) -> list[nn.Module]:
        """The outermost models that were called so far and still exist."""
        alive = [module for held, _ in self._models if (module := held()) is not None]
        if len(alive) < 2:
            return alive
        inner = {id(part) for module in alive for part in module.modules() if part is not module}
        return [module for module in alive if id(module) not in inner]

    def known_model(self, module: nn.Module) -> str | None:
        """The name of a model that is already in the registry."""
        for held, name in self._models:
            if held() is module:
                return name
        return None

    def add_model(self, module: nn.Module) -> str:
        """Add a model and its parameters; returns the name that its author gave it."""
        name = self.known_model(module)
        if name is None:
            frame = user_frame(2)
            while frame is not None and isinstance(variables(frame).get("self"), nn.Module):
                frame = frame.f_back
            taken = {known for _, known in self._models}
            name = name_of(module, frame) or type(module).__name__
            name = name if name not in taken else f"{name}#{len(self._models)}"
            self._models.append((weakref.ref(module), name))
            self.models.append(ModelFacts(name=name, type=type(module).__name__, modules=module_facts(module)))
        self._enter(module, name)
        return name

    def _enter(self, module: nn.Module, model: str) -> None:
        for path, part in module.named_modules():
            self.note_gathered(part)
            for own, tensor in part._parameters.items():
                if tensor is None:
                    continue
                record = self.add(tensor)
                record.requires_grad = tensor.requires_grad
                if is_sharded(tensor):
                    self._sharded[id(part), own] = record.id
                if not record.model:
                    record.name = f"{path}.{own}" if path else own
                    record.model, record.module_type = model, type(part).__name__
                    self._owners.add(model)
        for where, tensor in stray_tensors(module):
            record = self.add(tensor)
            if not record.model:
                record.model, record.name, record.registered = model, where, False
                self._owners.add(model)

    def note_gathered(self, module: nn.Module) -> None:
        """Register the whole tensors that replace the sharded parameters of an FSDP module while it runs."""
        if not self._sharded:
            return
        for own, tensor in module._parameters.items():
            number = self._sharded.get((id(module), own))
            if tensor is None or number is None or self.id_of(tensor) is not None:
                continue
            sharded = self.parameters[number].tensor()
            if sharded is not None and sharded.shape == tensor.shape:
                self._ids[id(tensor)] = number
                self._gathered[number] = weakref.ref(tensor)

    def label(self, record: Parameter) -> str:
        """The name of a parameter, prefixed with its model if there are several."""
        name = record.name or f"tensor of shape {tuple(record.shape)}"
        return f"{record.model}.{name}" if len(self._owners) > 1 and record.model else name


def _is_other(before: float, now: float | None) -> bool:
    return not math.isclose(before, now if now is not None else math.nan, rel_tol=1e-3)


def module_facts(model: nn.Module) -> list[ModuleFacts]:
    """The modules of a model, at most 2000."""
    parts = islice(model.named_modules(), 2000)
    return [ModuleFacts(path=path, type=type(part).__name__) for path, part in parts]


def stray_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Tensors and modules in plain attributes of a model, which `parameters()` does not return."""
    owned = {id(tensor) for tensor in model.parameters()}
    children = {id(part) for part in model.modules()}
    for path, part in model.named_modules():
        prefix = f"{path}." if path else ""
        for key, value in list(vars(part).items()):
            if key.startswith("_"):
                continue
            for where, held in _members(f"{prefix}{key}", value):
                if isinstance(held, nn.Module):
                    if id(held) not in children:
                        for own, tensor in held.named_parameters():
                            if id(tensor) not in owned:
                                yield f"{where}.{own}", tensor
                elif held.requires_grad and held.is_leaf and id(held) not in owned:
                    yield where, held


def _members(where: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (nn.Module, Tensor)):
        yield where, value
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value[:256]):
            if isinstance(item, (nn.Module, Tensor)):
                yield f"{where}[{i}]", item
    elif isinstance(value, dict):
        for key, item in list(value.items())[:256]:
            if isinstance(item, (nn.Module, Tensor)):
                yield f"{where}[{key!r}]", item
