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

import copy
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from surefoot.keep.checkpoint.tree import local_part, odd_kind, same_view

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Place: TypeAlias = Literal["device", "pinned"]
"""Where the copy of a tensor that lies on a GPU goes. Others are cloned beside themselves."""

ALIGNED = 64
SMALL = 1 << 16
"""Entries up to which a tensor on its way to pinned memory is copied on the device first."""


class Staged:
    """A state's copy, possibly still on its way."""

    def __init__(self, tree: Any, copies: Sequence[Tensor] = (), arrived: Sequence[torch.cuda.Event] = ()) -> None:
        self.tree = tree
        """The state with every tensor replaced by its copy."""
        self._copies = copies
        self._arrived = arrived

    def wait(self) -> None:
        """Let the host wait until every copy is complete. From any thread."""
        for event in self._arrived:
            event.synchronize()

    def hold_updates(self) -> None:
        """Let what is launched on the device from here on wait for the copies; the host goes on."""
        for event in self._arrived:
            torch.cuda.current_stream().wait_event(event)


def stage(tree: Any, place: Place = "pinned", into: Staged | None = None) -> Staged:
    """Copy a state; `into` gives the memory of an earlier copy of the same shape to be used again."""
    live: list[Tensor] = []
    numbers: dict[Any, int] = {}

    def number_of(tensor: Tensor) -> Any:
        part = local_part(tensor)
        if odd_kind(part):
            return tensor  # whoever writes it down will say that it cannot be
        view = same_view(part)
        number = numbers.setdefault(len(live) if view is None else view, len(live))
        if number == len(live):
            live.append(part)
        return _Slot(number)

    outline = map_leaves(tree, Tensor, number_of)
    copies = into._copies if into is not None and _fits(into._copies, live, place) else _room_for(live, place)
    arrived = _copy(live, copies)
    return Staged(map_leaves(outline, _Slot, lambda slot: copies[slot.number]), copies, arrived)


@dataclass(frozen=True)
class _Slot:
    """Stands for a tensor in the outline of a state."""

    number: int


def map_tensors(tree: Any, change: Callable[[Tensor], Any]) -> Any:
    """The same nesting in containers of its own, each tensor replaced by what `change` makes of it."""
    return map_leaves(tree, Tensor, change)


def map_leaves(tree: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """The same nesting in containers of its own, each leaf of a kind replaced by what `change` makes of it."""
    if isinstance(tree, kind):
        return change(tree)
    if isinstance(tree, dict):
        changed = copy.copy(tree)  # keeps an OrderedDict and a Counter what they are
        for key, value in tree.items():
            changed[key] = map_leaves(value, kind, change)
        return changed
    if hasattr(tree, "_asdict"):
        return type(tree)(*(map_leaves(value, kind, change) for value in tree))
    if type(tree) in (list, tuple, set, frozenset):
        return type(tree)([map_leaves(value, kind, change) for value in tree])
    if isinstance(tree, np.ndarray):
        return tree.copy()
    return tree


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


def bytes_of(tree: Any) -> int:
    """How much memory a copy takes."""
    sizes: dict[Any, int] = {}

    def note(tensor: Tensor) -> Tensor:
        part = local_part(tensor)
        view = same_view(part)
        sizes[len(sizes) if view is None else view] = part.numel() * part.element_size()
        return tensor

    map_tensors(tree, note)
    return sum(sizes.values())


def _fits(copies: Sequence[Tensor], live: Sequence[Tensor], place: Place) -> bool:
    return len(copies) == len(live) and all(
        copied.shape == tensor.shape
        and copied.dtype == tensor.dtype
        and copied.device == (tensor.device if place == "device" else torch.device("cpu"))
        for copied, tensor in zip(copies, live, strict=True)
    )


def _room_for(live: Sequence[Tensor], place: Place) -> list[Tensor]:
    if place == "device":
        return [torch.empty_like(tensor) for tensor in live]
    pinned = iter(_pinned([tensor for tensor in live if tensor.device.type == "cuda"]))
    return [next(pinned) if tensor.device.type == "cuda" else torch.empty_like(tensor) for tensor in live]


def _pinned(live: Sequence[Tensor]) -> list[Tensor]:
    """One block for all: the allocator of pinned memory rounds each piece up to a power of two."""
    ends = list(accumulate(-(-tensor.numel() * tensor.element_size() // ALIGNED) * ALIGNED for tensor in live))
    if not ends:
        return []
    block = torch.empty(ends[-1], dtype=torch.uint8, device="cpu", pin_memory=True)
    return [
        block[start : start + tensor.numel() * tensor.element_size()].view(tensor.dtype).view(tensor.shape)
        for start, tensor in zip([0, *ends], live, strict=False)
    ]


@torch.no_grad()
def _copy(live: Sequence[Tensor], copies: Sequence[Tensor]) -> list[torch.cuda.Event]:
    """Copy in as few launches as there are kinds of tensors; returns what to wait for."""
    groups: dict[tuple[torch.device, torch.device, torch.dtype], list[int]] = {}
    for i, (tensor, copied) in enumerate(zip(live, copies, strict=True)):
        groups.setdefault((tensor.device, copied.device, tensor.dtype), []).append(i)
    streams: dict[torch.device, torch.cuda.Stream] = {}
    for (source, target, _), members in groups.items():
        targets, sources = [copies[i] for i in members], [live[i] for i in members]
        if source != target:
            streams[source] = _leave(source, targets, sources)
            continue
        torch._foreach_copy_(targets, sources)
        if source.type == "cuda":
            streams.setdefault(source, torch.cuda.current_stream(source))
    events = []
    for device, stream in streams.items():
        with torch.cuda.device(device):
            events.append(torch.cuda.Event())  # type: ignore[no-untyped-call]
            events[-1].record(stream)
    return events


_LEAVING: dict[torch.device, torch.cuda.Stream] = {}


def _leave(device: torch.device, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> torch.cuda.Stream:
    """Copy to pinned memory on a stream of its own."""
    stream = _LEAVING.setdefault(device, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
    steady = [source.clone() if source.numel() <= SMALL else source for source in sources]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for target, source in zip(targets, steady, strict=True):
            target.copy_(source, non_blocking=True)
            source.record_stream(stream)
    return stream
