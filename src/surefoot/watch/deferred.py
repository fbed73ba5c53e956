"""Numbers that are measured on a device and read later, many in one copy.

Reading a number from a GPU makes the host wait for all earlier work, and a sampled step needs thousands of them.
`number`, `numbers` and `later` return plain values for tensors on the CPU. For others they return a `Deferred`, which
takes the place of the value in the facts. `begin_copy` collects everything requested so far in one buffer per device
and starts one asynchronous copy of it; `read` fills in the values. Code that would branch on a value passes the branch
to `later` as a function, which runs on the host when the value has arrived.

`ArrivalQueue` holds facts back until their last numbers have been copied. A failed device (for example after a
device-side assert) never returns its numbers: `read` raises `Lost`.
"""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass, replace
from functools import cache
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from surefoot.core.device_copies import begin_reading
from surefoot.core.without_hooks import WithoutHooks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from surefoot.core.device_copies import AsyncCopy


READ_AT_ONCE = {"cpu"}
"""The kinds of devices whose numbers can be read without waiting."""
MOST_BYTES = 1 << 23
"""A copy starts automatically when this many bytes are waiting."""
SMALL_BYTES = 1 << 12
"""A tensor may keep a storage alive that is larger than itself by at most this many bytes."""
ABSENT: Any = object()
"""A function given to `later` returns this for an element that its list should omit."""

_PLAIN = frozenset((str, int, float, bool, type(None)))
_T = TypeVar("_T")


class Lost(Exception):
    """The device did not return the numbers."""


class Deferred:
    """A value that is not on the host yet, or is computed from such values."""

    __slots__ = ("_function", "_inputs", "_value")

    def __init__(self, function: Callable[..., Any] | None, inputs: tuple[Any, ...]) -> None:
        self._function, self._inputs = function, inputs
        self._value: Any = None

    def read(self) -> Any:
        """The value. Waits for the device if it has not arrived."""
        if self._function is not None:
            self._value = self._function(*[value.read() if isinstance(value, Deferred) else value
                                           for value in self._inputs])  # fmt: skip
            self._function, self._inputs = None, ()
        return self._value


class _OnDevice(Deferred):
    """A tensor on a device. `read` returns a number, or a tensor on the CPU if it has dimensions."""

    __slots__ = ("_place", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(None, ())
        self.tensor: Tensor | None = tensor
        self._place: tuple[Copy, int, torch.Size, torch.dtype] | None = None

    def copied(self, copy: Copy, offset: int) -> None:
        """Its bytes will be at `offset` of a copy. Releases the tensor."""
        if self.tensor is not None:
            self._place = copy, offset, self.tensor.shape, self.tensor.dtype
            self.tensor = None

    def read(self) -> Any:
        if self.tensor is not None:
            begin_copy()
        if self.tensor is not None:
            raise Lost
        if self._place is not None:
            copy, offset, shape, dtype = self._place
            found = copy.bytes()[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
            self._value = found if shape else found.item()
            self._place = None
        return self._value


class Copy:
    """The bytes of many tensors, being copied from one device."""

    def __init__(self, reading: AsyncCopy) -> None:
        self._reading = reading
        self._is_lost = False

    def has_arrived(self) -> bool:
        """Whether `bytes` returns without waiting."""
        try:
            return self._is_lost or self._reading.has_arrived()
        except RuntimeError:
            return True

    def bytes(self) -> Tensor:
        """All bytes, on the host. Waits for them; raises `Lost` if the device has failed."""
        if self._is_lost:
            raise Lost
        try:
            return self._reading.wait()
        except RuntimeError as error:  # the device has failed; every later call would fail too
            self._is_lost = True
            raise Lost(str(error)) from None


class _Outstanding:
    """The tensors that the next copy will contain."""

    def __init__(self) -> None:
        self.sources: list[_OnDevice] = []
        self.bytes = 0
        self.so_far = 0
        """The number of tensors that ever waited."""
        self.last: Copy | None = None
        """The last copy that was started."""


_waiting = _Outstanding()


def reads_at_once(tensor: Tensor) -> bool:
    """Whether the values of a tensor can be read without waiting."""
    return tensor.device.type in READ_AT_ONCE


def deferred_so_far() -> int:
    """The number of tensors that were left on a device so far, to be read later."""
    return _waiting.so_far


def _defer(tensor: Tensor) -> _OnDevice:
    if tensor.untyped_storage().nbytes() > SMALL_BYTES + tensor.nbytes:
        tensor = tensor.clone()  # a view of a larger storage, which must not live until the copy starts
    source = _OnDevice(tensor)
    _waiting.sources.append(source)
    _waiting.bytes += tensor.nbytes
    _waiting.so_far += 1
    if _waiting.bytes > MOST_BYTES:
        begin_copy()
    return source


def later(function: Callable[..., _T], *values: Any) -> _T:
    """Call `function` with some values: immediately if all are available, otherwise when they have arrived.

    The function gets a tensor without dimensions as a number, and any other as a tensor on the CPU. The tensors must
    be surefoot's own: the script may write into its own before they are copied.
    """
    inputs = []
    is_known = True
    for value in values:
        if isinstance(value, Tensor):
            if reads_at_once(value):
                value = value if value.dim() else value.item()
            else:
                value, is_known = _defer(value), False
        elif isinstance(value, Deferred):
            is_known = False
        inputs.append(value)
    return function(*inputs) if is_known else cast("_T", Deferred(function, tuple(inputs)))


def number(tensor: Tensor) -> Any:
    """The value of a tensor of one element."""
    if reads_at_once(tensor):
        return tensor.item()
    return _defer(tensor if not tensor.dim() else tensor.reshape(()))


def own(tensor: Tensor) -> Tensor:
    """A copy of one of the script's tensors, to be read later."""
    return tensor.detach() if reads_at_once(tensor) else tensor.detach().clone()


def numbers(vector: Tensor) -> list[Any]:
    """The values of a vector, as a list."""
    if reads_at_once(vector):
        return vector.tolist()
    values = Deferred(Tensor.tolist, (_defer(vector),))
    return [Deferred(itemgetter(place), (values,)) for place in range(len(vector))]


def begin_copy() -> Copy | None:
    """Start to copy everything that is not being copied yet; returns the last copy, after which all have arrived."""
    sources = _waiting.sources[:]
    del _waiting.sources[: len(sources)]
    _waiting.bytes = 0
    by_device: dict[torch.device, list[_OnDevice]] = {}
    for source in sources:
        if source.tensor is not None:
            by_device.setdefault(source.tensor.device, []).append(source)
    for each in by_device.values():
        with WithoutHooks():
            _waiting.last = _begin(each) or _waiting.last
    return _waiting.last


def _begin(sources: list[_OnDevice]) -> Copy | None:
    """Copy tensors of one device. Larger types come first, so that each is aligned to its size."""
    by_type: dict[torch.dtype, list[tuple[_OnDevice, Tensor]]] = {}
    for source in sources:
        if source.tensor is not None:
            by_type.setdefault(source.tensor.dtype, []).append((source, source.tensor.reshape(-1)))
    ordered = sorted(by_type.items(), key=lambda item: -item[0].itemsize)
    try:
        parts = [torch.cat([flat for _, flat in held]).view(torch.uint8) for _, held in ordered]
        copy = Copy(begin_reading(torch.cat(parts)))
    except RuntimeError:  # the device has failed; the tensors stay there, and reading them raises
        return None
    offset = 0
    for dtype, held in ordered:
        for source, flat in held:
            source.copied(copy, offset)
            offset += flat.numel() * dtype.itemsize
    return copy


# ---- inserting the values -------------------------------------------------------------------------------------------


def read(value: _T) -> _T:
    """Facts, or a list or dictionary of them, with all deferred values read. Waits for the device."""
    found: Any = value
    kind: Any = type(found)
    if kind in _PLAIN:
        return value
    if kind is Deferred or kind is _OnDevice:
        return cast("_T", found.read())
    if kind is list:
        items = [read(item) for item in found]
        if all(new is old for new, old in zip(items, found, strict=True)):
            return value
        return cast("_T", [item for item in items if item is not ABSENT])
    if kind is dict:
        return cast("_T", {key: read(item) for key, item in found.items()})
    if kind is tuple:
        return cast("_T", tuple(read(item) for item in found))
    changed = {}
    for name in _names(kind):
        old = getattr(found, name)
        if type(old) not in _PLAIN and (new := read(old)) is not old:
            changed[name] = new
    return cast("_T", replace(found, **changed)) if changed else value


def read_each(items: Iterable[_T]) -> list[_T]:
    """The items with all deferred values read; those that a device has lost are left out."""
    found = []
    for item in items:
        try:
            found.append(read(item))
        except Lost:
            continue
    return [item for item in found if item is not ABSENT]


@cache
def _names(kind: type) -> tuple[str, ...]:
    """The fields of a dataclass; empty for any other class."""
    return tuple(field.name for field in fields(kind)) if is_dataclass(kind) else ()


class Count:
    """Counts how often a condition was true, where some results are still on a device."""

    __slots__ = ("_coming", "_known")

    def __init__(self) -> None:
        self._known = 0
        self._coming: list[Deferred] = []

    def add(self, happened: Any) -> None:
        """Count one more if `happened` is true; it may be read later."""
        if isinstance(happened, Deferred):
            self._coming.append(happened)
        else:
            self._known += bool(happened)

    @property
    def value(self) -> int:
        """The count. Waits for results that have not arrived; those that a device has lost are not counted."""
        coming, self._coming = self._coming, []
        self._known += sum(map(bool, read_each(coming)))
        return self._known


class _QueuedFacts(NamedTuple, Generic[_T]):
    facts: _T
    copy: Copy | None
    """The copy that contains the last of the numbers; `None` if there is nothing to wait for."""
    is_complete: bool


class ArrivalQueue(Generic[_T]):
    """Passes facts on, in their order, once all their numbers have arrived."""

    def __init__(self, keep: Callable[[_T], None]) -> None:
        self._keep = keep
        self.waiting: list[_QueuedFacts[_T]] = []
        self.count = 0
        """The number of facts added so far, including those that have been passed on."""

    def add(self, facts: _T, has_deferred: bool) -> None:
        """Add facts; `has_deferred` is true if some of their numbers may be on a device."""
        self.count += 1
        self.waiting.append(_QueuedFacts(facts, begin_copy() if has_deferred else None, not has_deferred))

    def settle(self, wait: bool) -> None:
        """Pass on complete facts, or all with `wait`. Facts whose numbers a device has lost are dropped."""
        while self.waiting and (wait or self.waiting[0].copy is None or self.waiting[0].copy.has_arrived()):
            first = self.waiting.pop(0)
            try:
                facts = first.facts if first.is_complete else read(first.facts)
            except Lost:
                continue
            self._keep(facts)
