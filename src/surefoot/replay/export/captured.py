"""Recorded calls, and the tensors that were passed to them, as they were at that time.

A value is identified by its memory and by how often that memory had been written to (`Key`): an output and the input it
becomes are the same value, a tensor before and after `add_` are two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from surefoot.replay.locate.frames import Place

_LARGEST_KEPT = 2**31
"""The maximum bytes of stored values; those furthest from the failure are dropped first."""


class Key(NamedTuple):
    """Which value: the same place, seen the same way, written to equally often."""

    storage: Any
    offset: int = 0
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    flipped: tuple[bool, bool] = (False, False)
    """Whether it is to be read conjugated, or negated."""
    version: int = 0


def key_of(tensor: Tensor) -> Key:
    """The current value of a tensor."""
    try:
        return Key(
            tensor.untyped_storage()._cdata,
            int(tensor.storage_offset()),
            tuple(tensor.shape),
            tuple(tensor.stride()),
            tensor.dtype,
            (tensor.is_conj(), tensor.is_neg()),
            0 if tensor.is_inference() else tensor._version,
        )
    except (RuntimeError, NotImplementedError):  # sparse, nested and some subclasses: they are never kept
        return Key(("odd", id(tensor)))


@dataclass(eq=False)
class Ran:
    """One call: a function of torch's as the program called it, or an operation as it was dispatched."""

    func: Any
    args: Any
    """Its arguments, with a `Key` in place of every tensor."""
    kwargs: Mapping[str, Any]
    inputs: dict[Key, Callable[[], Tensor | None]]
    """The tensors among the arguments, as far as they still exist."""
    place: Place | None
    autocast: dict[str, torch.dtype]
    """By kind of device, where it was on."""
    needs_gradient: list[Key]
    outputs: dict[Key, str] = field(default_factory=dict)
    """Each tensor in the result with its access path: `""`, `[0]`, `[1][0]`."""
    written: list[Key] = field(default_factory=list)
    """Inputs that it overwrites, as they were before."""
    is_random: bool = False
    operations: int = 0
    """How many operations it consists of."""

    @property
    def is_operation(self) -> bool:
        """Whether it was seen below autograd and autocast, as torch dispatched it."""
        return isinstance(self.func, torch._ops.OpOverload)


@dataclass
class CapturedCalls:
    """The last calls up to the one that failed, which is the last of them."""

    calls: list[Ran]
    values: dict[Key, Tensor]
    """Copies of the inputs that had not been overwritten since."""
    names: dict[Key, str]
    """The program's names for them."""
    upstream: dict[str, Tensor] = field(default_factory=dict)
    """In backward: the gradients that arrived at the outputs of the last call."""

    @property
    def bad(self) -> Ran:
        """The call that failed."""
        return self.calls[-1]


def keep_values(calls: list[Ran]) -> dict[Key, Tensor]:
    """Copies of all inputs of some calls that are unchanged, the nearest first."""
    values: dict[Key, Tensor] = {}
    room = _LARGEST_KEPT
    for ran in reversed(calls):
        for key, held in ran.inputs.items():
            tensor = held()
            if tensor is None or key in values or key_of(tensor) != key or not _can_be_kept(tensor):
                continue
            size = tensor.numel() * tensor.element_size()
            if size <= room:
                values[key] = plain_copy(tensor)
                room -= size
    return values


def _can_be_kept(tensor: Tensor) -> bool:
    strided = tensor.layout == torch.strided and not tensor.is_nested
    return strided and not tensor.is_quantized and not tensor.is_meta


def plain_copy(tensor: Tensor) -> Tensor:
    """Only the values: no graph, no view, no subclass."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if type(tensor) is not Tensor:
        tensor = tensor.as_subclass(Tensor)
    return tensor.clone(memory_format=torch.contiguous_format)
