"""Copies of a state that is still being trained, taken without a stall.

A copy has to be complete before the next optimizer step writes into what it was taken from. Three places, three ways:

- On the CPU the tensors are cloned; that is the stall.
- On a GPU with room to spare they are copied on the device, in order with everything else there, in about a millisecond
  for a gigabyte. The host waits for nothing.
- On a GPU without room they are copied to pinned host memory on a stream of their own while the next forward and
  backward run, and `hold_updates` makes the optimizer step wait for the rest. Small tensors, which a forward may write
  (BatchNorm's statistics), go through a copy on the device all the same.

A state is nested dictionaries, lists and tuples; tensors are copied, everything else is taken over as it is, in
containers of the copy's own. A tensor that occurs twice (tied weights) is copied once. Of a DTensor the local shard is.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch._utils import _unflatten_dense_tensors

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
from surefoot.keep.checkpoint.tree import local_part, odd_kind, same_view

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Place: TypeAlias = Literal["device", "pinned"]
"""Where the copy of a tensor that lies on a GPU goes. Others are cloned beside themselves."""

SMALL = 1 << 16
"""Entries up to which a tensor on its way to pinned memory is copied on the device first."""


class Staged:
    """A state's copy, possibly still on its way."""

    def __init__(
        self,
        tree: Any,
        copies: Sequence[Tensor] = (),
        arrived: Sequence[torch.Event] = (),
        origin: Sequence[Any] = (),
    ) -> None:
        self._outline: Any = tree
        self._copies = copies
        self._arrived = arrived
        self._origin = origin
        """What the copies were taken from: the place, and the windows on memory."""

    @cached_property
    def tree(self) -> Any:
        """The state with every tensor replaced by its copy."""
        return map_leaves(self._outline, _Slot, lambda slot: self._copies[slot.number])

    def wait(self) -> None:
        """Let the host wait until every copy is complete. From any thread."""
        for event in self._arrived:
            event.synchronize()

    def hold_updates(self) -> None:
        """Let what is launched on the device from here on wait for the copies; the host goes on."""
        for event in self._arrived:
            current_stream().wait_event(event)


def stage(tree: Any, place: Place = "pinned", into: Staged | None = None) -> Staged:
    """Copy a state; `into` gives the memory of an earlier copy of the same shape to be used again."""
    live = _Collector()
    outline = map_leaves(tree, Tensor, live.slot_of)
    origin = [place, *((t.data_ptr(), t.dtype, t.shape) for t in live.tensors)]
    # Most often the very tensors that were copied last time, and then there is nothing to compare.
    fits = into is not None and (origin == into._origin or _fits(into._copies, live.tensors, place))
    copies = into._copies if into is not None and fits else _room_for(live.tensors, place)
    return Staged(outline, copies, _copy(live.tensors, copies), origin)


class _Slot:
    """Stands for a tensor in the outline of a state."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


class _Collector:
    """The tensors of a state, each window on memory once."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._numbers: dict[int, list[int]] = {}

    def slot_of(self, tensor: Tensor) -> Any:
        """What to put in a tensor's place; the tensor itself if it is of a kind that cannot be written down."""
        part = local_part(tensor)
        if odd_kind(part):
            return tensor  # the writer refuses it with its path
        seen = self._numbers.setdefault(part.data_ptr(), [])
        for number in seen:  # hardly ever more than one
            view = same_view(part)
            if view is not None and view == same_view(self.tensors[number]):
                return _Slot(number)
        seen.append(len(self.tensors))
        self.tensors.append(part)
        return _Slot(seen[-1])


def map_tensors(tree: Any, change: Callable[[Tensor], Any]) -> Any:
    """The same nesting in containers of its own, each tensor replaced by what `change` makes of it."""
    return map_leaves(tree, Tensor, change)


def map_leaves(tree: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """The same nesting in containers of its own, each leaf of a kind replaced by what `change` makes of it.

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
    """A value that goes with a parameter's shard, as a DTensor like it; of a plain parameter, the value itself."""
    if not hasattr(parameter, "to_local") or value.shape != local_part(parameter).shape or not value.ndim:
        return value
    from torch.distributed.tensor import DTensor

    # Shards may differ in size by rank, so the size of the whole does not follow from this one.
    return DTensor.from_local(
        value,
        parameter.device_mesh,  # type: ignore[attr-defined]
        parameter.placements,  # type: ignore[attr-defined]
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def laid_like(parameter: Tensor, saved: Tensor, device: torch.device) -> Tensor:
    """A copy, in memory as torch would lay it out beside its parameter.

    Copies and files keep no strides, and fused kernels pair what lies at equal places in memory. With channels-last
    weights these would be the wrong pairs.
    """
    if lies_like(parameter, saved):
        return saved.to(device, copy=True)
    return torch.empty_like(local_part(parameter), dtype=saved.dtype, device=device).copy_(saved)


def lies_like(parameter: Tensor, value: Tensor) -> bool:
    """Whether a value has the strides that torch gives to what belongs to a parameter, or is of another shape."""
    here = local_part(parameter)
    if value.shape != here.shape or value.layout is not torch.strided or here.layout is not torch.strided:
        return True
    return value.stride() == here.stride() or value.stride() == torch.empty_like(here, device="meta").stride()


def bytes_of(tree: Any) -> int:
    """How much memory a copy takes."""
    live = _Collector()
    map_leaves(tree, Tensor, live.slot_of)
    return sum(tensor.numel() * tensor.element_size() for tensor in live.tensors)


def _fits(copies: Sequence[Tensor], live: Sequence[Tensor], place: Place) -> bool:
    return len(copies) == len(live) and all(
        copied.shape == tensor.shape
        and copied.dtype == tensor.dtype
        and copied.device == (tensor.device if place == "device" else torch.device("cpu"))
        for copied, tensor in zip(copies, live, strict=True)
    )


def _room_for(live: Sequence[Tensor], place: Place) -> list[Tensor]:
    """Memory for the copies: one block per device and dtype, since a thousand allocations take a thousand times one."""
    blocks: dict[tuple[torch.device, torch.dtype, bool], list[int]] = {}
    for i, tensor in enumerate(live):
        pinned = place == "pinned" and has_streams(tensor.device)
        device = torch.device("cpu") if pinned else tensor.device
        blocks.setdefault((device, tensor.dtype, pinned), []).append(i)
    room: list[Tensor] = [torch.empty(0)] * len(live)
    for (device, dtype, pinned), members in blocks.items():
        shapes = [live[i] for i in members]
        block = torch.empty(sum(t.numel() for t in shapes), dtype=dtype, device=device, pin_memory=pinned)
        for i, part in zip(members, _unflatten_dense_tensors(block, shapes), strict=True):  # type: ignore[no-untyped-call]
            room[i] = part
        if pinned:
            keep_if_device_fails(room[members[0]])  # and with it the block
    return room


@torch.no_grad()
def _copy(live: Sequence[Tensor], copies: Sequence[Tensor]) -> list[torch.Event]:
    """Copy in as few launches as there are kinds of tensors; returns what to wait for."""
    groups: dict[tuple[torch.device, torch.device, torch.dtype], list[int]] = {}
    for i, (tensor, copied) in enumerate(zip(live, copies, strict=True)):
        groups.setdefault((tensor.device, copied.device, tensor.dtype), []).append(i)
    streams: dict[torch.device, torch.Stream] = {}
    for (source, target, _), members in groups.items():
        targets, sources = [copies[i] for i in members], [live[i] for i in members]
        if source != target:
            streams[source] = _leave(source, targets, sources)
            continue
        torch._foreach_copy_(targets, sources)
        if has_streams(source):
            streams.setdefault(source, current_stream(source))
    events = []
    for device, stream in streams.items():
        with device_context(device):
            events.append(new_event(device))
            events[-1].record(stream)
    return events


_LEAVING: dict[torch.device, torch.Stream] = {}


def _leave(device: torch.device, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> torch.Stream:
    """Copy to pinned memory on a stream of its own."""
    stream = _LEAVING.setdefault(device, new_stream(device))
    steady = [source.clone() if source.numel() <= SMALL else source for source in sources]
    stream.wait_stream(current_stream(device))
    with on_stream(stream):
        for target, source in zip(targets, steady, strict=True):
            target.copy_(source, non_blocking=True)
            source.record_stream(stream)
    return stream
