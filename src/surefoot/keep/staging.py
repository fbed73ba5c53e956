"""Copies a state during training without a stall.

A copy must be complete before the next optimizer step writes into its source. There are three ways:

- On the CPU the tensors are cloned; that is the stall.
- On a GPU with enough free memory they are copied on the device, in order with other work, in about a millisecond per
  gigabyte. The host does not wait.
- On a GPU without free memory they are copied to pinned host memory on a separate stream during the next forward and
  backward, and `hold_updates` makes the optimizer step wait for the rest. Small tensors, which a forward may write
  (BatchNorm's statistics), are first copied on the device.

A state consists of nested dictionaries, lists and tuples. Tensors are copied, everything else is taken over unchanged,
in new containers. A tensor that occurs twice (tied weights) is copied once. For a DTensor, the local shard is copied.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn import Parameter

from surefoot.core import nested
from surefoot.core.device import (
    current_stream,
    device_context,
    has_streams,
    keep_if_device_fails,
    new_event,
    new_stream,
    on_stream,
)
from surefoot.keep.checkpoint.shards import Spread, is_spread, spread_of
from surefoot.keep.checkpoint.tree import local_part, odd_kind, same_view

Place: TypeAlias = Literal["device", "pinned"]
"""The place of the copy of a GPU tensor. Other tensors are cloned on their device."""

_NUMBERS_AND_TEXT = frozenset((type(None), bool, int, float, str))
_Layout: TypeAlias = "Sequence[tuple[torch.device, torch.dtype, torch.Size]]"
"""The layout of each copied tensor."""
_Streams = dict[torch.device, torch.Stream]

LARGEST_BLOCK = 1 << 30
"""Tensors up to this size are copied into one block: torch concatenates larger ones tensor by tensor."""
SMALL = 1 << 16
"""Tensors up to this size are copied on the device before they are copied to pinned memory."""


class Staged:
    """The copy of a state, which may be incomplete."""

    def __init__(
        self,
        outline: Any,
        copies: _Copies | None = None,
        arrived: Sequence[torch.Event] = (),
        spread: Mapping[int, Spread] | None = None,
    ) -> None:
        self._outline, self._copies, self._arrived = outline, copies or _Copies("device", _Plan(())), arrived
        self._spread = spread or {}

    @cached_property
    def tree(self) -> Any:
        """The state with every tensor replaced by its copy."""
        copies = self._copies.tensors
        return map_leaves(self._outline, _Slot, lambda slot: copies[slot.number])

    def part(self, key: str) -> Any:
        """One entry of a state that is a dictionary, as in `tree`, without making the rest."""
        copies = self._copies.tensors
        return map_leaves(self._outline[key], _Slot, lambda slot: copies[slot.number])

    @cached_property
    def spread(self) -> dict[int, Spread]:
        """How the sharded tensors of `tree` are divided over processes, by their `id`."""
        copies = self._copies.tensors
        return {id(copies[number]): spread for number, spread in self._spread.items()}

    def wait(self) -> None:
        """Wait on the host until every copy is complete. May be called from any thread."""
        for event in self._arrived:
            event.synchronize()

    def hold_updates(self) -> None:
        """Make later work on the device wait for the copies; the host continues."""
        for event in self._arrived:
            current_stream().wait_event(event)


@torch.no_grad()
def stage(tree: Any, place: Place | Callable[[int], Place] = "pinned", into: Staged | None = None) -> Staged:
    """Copy a state; `into` is an earlier copy of the same shape, whose memory is reused.

    `place` may be a function that chooses it, given the size of the copy in bytes.
    """
    live = _Collector()
    outline = live.outline(tree)
    tensors = live.tensors
    plan = _plan_for(tensors)
    if callable(place):
        place = place(plan.bytes)
    if into is not None and into._copies.fits(place, plan):
        copies, streams = into._copies, _overwrite(into._copies, tensors)
    else:
        copies = _Copies(place, plan)
        streams = _fill(copies, tensors)
    return Staged(outline, copies, _events(streams), live.spread)


class _Slot:
    """Replaces a tensor in the outline of a state."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


class _Collector:
    """The tensors of a state, without duplicates."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.spread: dict[int, Spread] = {}
        """How the shards among them are divided over processes, by their number."""
        self._numbers: dict[int, list[int]] = {}
        self._around: list[int] = []
        """The open containers: one that contains itself is entered once."""

    def outline(self, value: Any) -> Any:
        """The same nesting with a slot in place of every tensor.

        Training waits for this, and a state has a thousand tensors: the common types are handled directly.
        """
        kind = type(value)
        if kind is Tensor or kind is Parameter:
            return self._slot(value)
        if kind in _NUMBERS_AND_TEXT or id(value) in self._around:
            return value
        self._around.append(id(value))
        if kind is dict:
            new: Any = {
                key: part if type(part) in _NUMBERS_AND_TEXT else self.outline(part) for key, part in value.items()
            }
        elif kind is list:
            new = [part if type(part) in _NUMBERS_AND_TEXT else self.outline(part) for part in value]
        elif kind is OrderedDict:
            new = OrderedDict([(key, self.outline(part)) for key, part in value.items()])
            vars(new).update(vars(value))  # the state dict of a module has its versions there
        else:
            new = map_leaves(value, Tensor, self._slot)
        self._around.pop()
        return new

    def _slot(self, tensor: Tensor) -> Any:
        """The replacement of a tensor; the tensor itself if it is of a kind that cannot be stored."""
        kind = type(tensor)
        part = tensor if kind is Tensor or kind is Parameter else local_part(tensor)
        if part.layout is not torch.strided or part.is_quantized or part.is_nested or part.is_meta:
            return tensor  # the writer refuses it with its path
        if part is not tensor and odd_kind(part):
            return tensor
        number, where = len(self.tensors), part.data_ptr()
        if where in self._numbers:  # tied weights, or an empty tensor
            view = same_view(part)
            for other in self._numbers[where]:
                if view is not None and view == same_view(self.tensors[other]):
                    return _Slot(other)
            self._numbers[where].append(number)
        else:
            self._numbers[where] = [number]
        self.tensors.append(part)
        if part is not tensor and is_spread(tensor):
            self.spread[number] = spread_of(tensor)
        return _Slot(number)


def map_tensors(tree: Any, change: Callable[[Tensor], Any]) -> Any:
    """The same nesting in new containers, with each tensor replaced by the result of `change`."""
    return map_leaves(tree, Tensor, change)


def map_leaves(tree: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """The same nesting in new containers, with each leaf of a kind replaced by the result of `change`.

    Arrays and sets are copied.
    """

    def changed(leaf: Any) -> Any:
        if isinstance(leaf, kind):
            return change(leaf)
        return (
            leaf.copy() if isinstance(leaf, np.ndarray) else type(leaf)(map_leaves(each, kind, change) for each in leaf)
        )

    return nested.map_leaves(tree, changed, (kind, np.ndarray, set, frozenset))


def sharded_like(parameter: Tensor, value: Tensor) -> Tensor:
    """A value of a parameter's shard, as a DTensor like it; for a plain parameter, the value itself."""
    if not hasattr(parameter, "to_local") or value.shape != local_part(parameter).shape or not value.ndim:
        return value
    from torch.distributed.tensor import DTensor

    # Shards may differ in size between ranks, so the whole size does not follow from this one.
    return DTensor.from_local(
        value,
        parameter.device_mesh,  # type: ignore[attr-defined]
        parameter.placements,  # type: ignore[attr-defined]
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def with_layout_of(parameter: Tensor, saved: Tensor, device: torch.device) -> Tensor:
    """A copy with the memory layout that torch would use for a parameter's state.

    Copies and files keep no strides, and fused kernels pair values at equal positions in memory. With channels-last
    weights these would be the wrong pairs.
    """
    if has_layout_of(parameter, saved):
        return saved.to(device, copy=True)
    return torch.empty_like(local_part(parameter), dtype=saved.dtype, device=device).copy_(saved)


def has_layout_of(parameter: Tensor, value: Tensor) -> bool:
    """Whether a value has the strides that torch gives to the state of a parameter, or has another shape."""
    here = local_part(parameter)
    if value.shape != here.shape or value.layout is not torch.strided or here.layout is not torch.strided:
        return True
    return value.stride() == here.stride() or value.stride() == torch.empty_like(here, device="meta").stride()


def bytes_of(tree: Any) -> int:
    """The size of a copy in bytes."""
    live = _Collector()
    live.outline(tree)
    return _plan_for(live.tensors).bytes


class _Plan:
    """The tensors that are copied into one block: those of one device and dtype, as many as torch concatenates."""

    def __init__(self, layout: _Layout) -> None:
        self.layout = layout
        self.sizes = [shape.numel() for _, _, shape in layout]
        self.bytes = sum(size * dtype.itemsize for size, (_, dtype, _) in zip(self.sizes, layout, strict=True))
        groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for i, (device, dtype, _) in enumerate(layout):
            groups.setdefault((device, dtype), []).append(i)
        self.blocks = [(*kind, part) for kind, members in groups.items() for part in self._parts(members)]
        """Device, dtype and the numbers of the tensors of each block."""

    def _parts(self, members: list[int]) -> Iterator[list[int]]:
        start = size = 0
        for end, i in enumerate(members):
            size += (own := self.sizes[i])
            if size > LARGEST_BLOCK and end > start:
                yield members[start:end]
                start, size = end, own
        yield members[start:]


_LAST_PLAN = [_Plan(())]


def _plan_for(tensors: Sequence[Tensor]) -> _Plan:
    """The plan for these tensors. The states of one run have one layout, so it is made once."""
    layout = [(tensor.device, tensor.dtype, tensor.shape) for tensor in tensors]
    plan = _LAST_PLAN[0]
    if plan.layout != layout:
        plan = _LAST_PLAN[0] = _Plan(layout)
    return plan


class _Copies:
    """The memory of a copy: one block for many tensors, because a thousand allocations would be slow."""

    def __init__(self, place: Place, plan: _Plan) -> None:
        self.place, self.plan = place, plan
        self._blocks: list[tuple[Tensor, Sequence[int]]] = []

    def fits(self, place: Place, plan: _Plan) -> bool:
        """Whether tensors of this plan can be copied into the same memory."""
        return self.place == place and (self.plan is plan or self.plan.layout == plan.layout)

    def add(self, block: Tensor, members: Sequence[int]) -> None:
        """Add a block with the copies of these tensors, one after the other."""
        self._blocks.append((block, members))

    @cached_property
    def tensors(self) -> dict[int, Tensor]:
        """The copies by number, created on first access, usually by the writing thread."""
        found: dict[int, Tensor] = {}
        for block, members in self._blocks:
            parts = torch.split_with_sizes(block, [self.plan.sizes[i] for i in members])
            for i, part in zip(members, parts, strict=True):
                shape = self.plan.layout[i][2]
                found[i] = part if len(shape) == 1 else part.view(shape)
        return found


def _fill(copies: _Copies, live: Sequence[Tensor]) -> _Streams:
    """Copy into new memory, with one call per kind of tensor; returns the streams that copy."""
    streams = _Streams()
    for device, dtype, members in copies.plan.blocks:
        own = [live[i] for i in members]
        size = sum(copies.plan.sizes[i] for i in members)
        if not has_streams(device):
            block = torch.empty(size, dtype=dtype, device=device)
            torch._foreach_copy_(_unflatten_dense_tensors(block, own), own)  # type: ignore[no-untyped-call]
        elif copies.place == "device":
            block = _concatenated(own)
            streams.setdefault(device, current_stream(device))
        else:
            block = torch.empty(size, dtype=dtype, device="cpu", pin_memory=True)
            keep_if_device_fails(block)
            targets = _unflatten_dense_tensors(block, own)  # type: ignore[no-untyped-call]
            streams[device] = _leave(device, targets, own)
        copies.add(block, members)
    return streams


def _concatenated(tensors: Sequence[Tensor]) -> Tensor:
    """The values of all tensors in new memory, one after the other."""
    if len(tensors) == 1:  # torch would return a view
        return tensors[0].clone(memory_format=torch.contiguous_format).view(-1)
    return _flatten_dense_tensors(tensors)  # type: ignore[no-any-return,no-untyped-call]


def _overwrite(copies: _Copies, live: Sequence[Tensor]) -> _Streams:
    """Copy into existing memory; returns the streams that copy."""
    streams = _Streams()
    for device, _, members in copies.plan.blocks:
        targets, sources = [copies.tensors[i] for i in members], [live[i] for i in members]
        if targets[0].device != device:
            streams[device] = _leave(device, targets, sources)
            continue
        torch._foreach_copy_(targets, sources)
        if has_streams(device):
            streams.setdefault(device, current_stream(device))
    return streams


def _events(streams: _Streams) -> list[torch.Event]:
    """Events that show that everything launched on the streams so far is done."""
    events = []
    for device, stream in streams.items():
        with device_context(device):
            events.append(new_event(device))
            events[-1].record(stream)
    return events


_LEAVING: dict[torch.device, torch.Stream] = {}


def _leave(device: torch.device, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> torch.Stream:
    """Copy to pinned memory on a separate stream."""
    stream = _LEAVING.setdefault(device, new_stream(device))
    steady = [source.clone() if source.numel() <= SMALL else source for source in sources]
    stream.wait_stream(current_stream(device))
    with on_stream(stream):
        for target, source in zip(targets, steady, strict=True):
            target.copy_(source, non_blocking=True)
            source.record_stream(stream)
    return stream
