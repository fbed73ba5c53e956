"""Copies from a device to the host that do not wait, and that can be read after the device has failed.

After a device has failed, every call of it raises, including freeing pinned memory that was copied to. So memory and
events of copies are never freed but reused, and numbers that had arrived before the failure can still be read.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from surefoot.core.device import (
    DeviceFailed,
    current_stream,
    has_failed,
    has_streams,
    keep_until_exit,
    new_event,
    note_failure,
    synchronize,
)


def permanent_host_memory(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for copies from a device, pinned if it has streams, that is never freed.

    Freeing pinned memory that was copied to records an event, which ends the process after the device has failed
    (`terminate called after throwing an instance of 'c10::AcceleratorError'`) and hides the error of the script.
    """
    with torch._C._InferenceMode(False):  # a tensor made in inference mode could not be written to outside it
        memory = torch.empty(size, dtype=dtype, device="cpu", pin_memory=has_streams(device))
    keep_until_exit(memory)
    return memory


class _Buffer:
    """Pinned memory, and the event that marks the end of the copy into it. Neither is ever freed."""

    __slots__ = ("_bytes", "_views", "arrived", "is_busy", "memory")

    def __init__(self, size: int, device: torch.device) -> None:
        self.memory = permanent_host_memory(size, torch.uint8, device)
        self._bytes = self.memory.numpy()
        self._views: dict[tuple[torch.dtype, int], Tensor] = {}
        self.arrived = new_event(device)
        keep_until_exit(self.arrived)
        self.is_busy = False
        """Whether a copy may still be in progress."""

    def clear(self) -> None:
        """Mark every number as absent."""
        self._bytes.fill(_ABSENT)

    def view(self, dtype: torch.dtype, count: int) -> Tensor:
        """The first `count` numbers of a type."""
        found = self._views.get((dtype, count))
        if found is None:
            found = self._views[dtype, count] = self.memory[: count * dtype.itemsize].view(dtype)
        return found


class _Buffers:
    """Reused buffers for copies to the host; sizes are powers of two, so that there are few."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, torch.device], deque[_Buffer]] = {}

    def take(self, count: int, device: torch.device) -> _Buffer:
        """A buffer for this many bytes of a device, without a copy in progress."""
        size = max(256, 1 << (count - 1).bit_length())
        free = self._free.setdefault((size, device), deque())
        for _ in range(len(free)):
            buffer = free.popleft()
            if not buffer.is_busy or buffer.arrived.query():
                break
            free.append(buffer)
        else:
            buffer = _Buffer(size, device)
        buffer.is_busy = True
        return buffer

    def give_back(self, buffer: _Buffer, device: torch.device) -> None:
        """Allow reuse, after the copy into it is complete."""
        self._free.setdefault((len(buffer.memory), device), deque()).append(buffer)


_ABSENT = 0xA5
"""A number with only these bytes has not arrived: no measured float or integer has this value."""
_buffers = _Buffers()


class AsyncCopy:
    """A vector of device numbers that is being copied to the host."""

    def __init__(self, host: Tensor, buffer: _Buffer | None = None, device: torch.device | None = None) -> None:
        """`host` is a view of the memory of a buffer, or the numbers themselves."""
        self._host, self._buffer, self._device = host, buffer, device
        self._give_back = _buffers.give_back

    def has_arrived(self, within: float = 0.0) -> bool:
        """Whether the numbers are on the host by now, or will be `within` this many seconds. Never a sync."""
        if self._buffer is None:
            return True
        if has_failed():
            return self._is_complete()
        try:
            deadline = time.perf_counter() + within
            while not self._buffer.arrived.query():
                if time.perf_counter() >= deadline:
                    return False
        except RuntimeError as error:
            if not note_failure(error):
                raise
            return self._is_complete()
        return True

    def wait(self) -> Tensor:
        """The numbers on the host. Waits for the copy if it has not arrived: this is the sync.

        After the device has failed, they are returned if they had already arrived; otherwise its error, or
        `DeviceFailed`, is raised.
        """
        if self._buffer is not None:
            error: RuntimeError = DeviceFailed("the device failed before its numbers had reached the host")
            if not has_failed():
                error = self._synchronize(self._buffer) or error
            if has_failed() and not self._is_complete():
                raise error
            self._host = self._host.clone()
            self._buffer.is_busy = False
            self._end()
        return self._host

    def _synchronize(self, buffer: _Buffer) -> RuntimeError | None:
        """Wait; returns the error if the device has failed in the meantime."""
        try:
            buffer.arrived.synchronize()
        except RuntimeError as error:
            if note_failure(error):
                return error
            raise
        return None

    def _is_complete(self) -> bool:
        """Whether all numbers have arrived, determined from the memory only."""
        absent = self._host.view(torch.uint8).view(-1) == _ABSENT
        size = self._host.element_size()
        size = size if size >= 4 else 8  # a single byte may have the value that marks absence
        whole = len(absent) // size * size
        rest = absent[whole:]
        return not bool(absent[:whole].view(-1, size).all(1).any()) and not (len(rest) > 0 and bool(rest.all()))

    def _end(self) -> None:
        buffer, self._buffer = self._buffer, None
        if buffer is not None and self._device is not None:
            self._give_back(buffer, self._device)

    def __del__(self) -> None:
        self._end()  # if `wait` was never called


def begin_reading(vector: Tensor) -> AsyncCopy:
    """Start one asynchronous copy of a vector into pinned host memory; a few steps later it has arrived."""
    device = vector.device
    if has_streams(device):
        buffer = _buffers.take(max(1, vector.nbytes), device)
        buffer.clear()
        host = buffer.view(vector.dtype, vector.numel())
        host = host if vector.ndim == 1 else host.view(vector.shape)
        host.copy_(vector.detach(), non_blocking=True)
        buffer.arrived.record(current_stream(device))
        return AsyncCopy(host, buffer, device)
    return AsyncCopy(vector.detach().to("cpu"))


def upload(values: Sequence[float], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """A table of numbers on a device, by default integers, copied without waiting."""
    with torch._C._InferenceMode(False):  # a table made in inference mode could not be written to outside it
        table = torch.empty(len(values), dtype=dtype, device=device)
    overwrite(table, values)
    return table


def overwrite(table: Tensor, values: Sequence[float]) -> None:
    """Replace the numbers of a table on a device, in order with its other work, without waiting."""
    device, dtype = table.device, table.dtype
    if not has_streams(device):
        table.copy_(torch.tensor(values, dtype=dtype, device="cpu"))
        return
    buffer = _buffers.take(max(1, len(values) * dtype.itemsize), device)
    host = buffer.view(dtype, len(values))
    host.numpy()[:] = values
    table.copy_(host, non_blocking=True)
    buffer.arrived.record(current_stream(device))
    _buffers.give_back(buffer, device)


# ---- single numbers -------------------------------------------------------------------------------------------------

_WORDS: dict[torch.dtype, tuple[torch.dtype, int]] = {
    torch.float64: (torch.int64, 0x7FF5A5A5A5A5A5A5),
    torch.float32: (torch.int32, 0x7FA5A5A5),
    torch.bfloat16: (torch.int16, 0x7FA5),
    torch.float16: (torch.int16, 0x7DA5),
}
"""For each type, the integer type of its size, and a value that marks absence: a NaN that no operation returns."""
_SLOTS = 256


class _NumberSlots:
    """Pinned memory for single numbers of one type from one device. It grows with the number of copies in progress."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._words, self.absent = _WORDS[dtype]
        self.free: deque[_NumberSlot] = deque()

    def take(self) -> _NumberSlot:
        """A slot without a copy in progress."""
        for _ in range(len(self.free)):
            slot = self.free.popleft()
            if slot.seen[slot.number] != self.absent:
                break
            self.free.append(slot)  # abandoned, and its number has not arrived yet
        else:
            memory = permanent_host_memory(_SLOTS, self._dtype, self._device).zero_()
            seen: Any = memory.view(self._words).numpy()
            slot, *more = (_NumberSlot(self, place, seen, number) for number, place in enumerate(memory))
            self.free.extend(more)
        slot.seen[slot.number] = self.absent
        return slot


class _NumberSlot:
    """The memory of one number: as a tensor, and as an array that can be read without calling torch."""

    __slots__ = ("number", "owner", "place", "seen")

    def __init__(self, owner: _NumberSlots, place: Tensor, seen: Any, number: int) -> None:
        self.owner, self.place, self.seen, self.number = owner, place, seen, number


_number_slots: dict[tuple[torch.dtype, torch.device], _NumberSlots] = {}


class ArrivingNumber:
    """One number that is being copied from a device. Its memory shows whether it has arrived: there is no event."""

    __slots__ = ("_device", "_slot", "_value")

    def __init__(self, slot: _NumberSlot, device: torch.device) -> None:
        self._slot: _NumberSlot | None = slot
        self._device, self._value = device, 0.0

    def has_arrived(self, within: float = 0.0) -> bool:
        """Whether the number is on the host by now, or will be `within` so many seconds. Does not access the device."""
        slot = self._slot
        if slot is None or slot.seen[slot.number] != slot.owner.absent:
            return True
        if not within:
            return False
        deadline = time.perf_counter() + within
        while slot.seen[slot.number] == slot.owner.absent:
            if time.perf_counter() >= deadline:
                return False
        return True

    def wait(self) -> float:
        """The number. Waits for the device if it has not arrived: this is the sync.

        After the device has failed, the number is returned if it had arrived; otherwise its error, or `DeviceFailed`,
        is raised.
        """
        slot = self._slot
        if slot is not None:
            if not self.has_arrived():
                self._synchronize()
            self._value = float(slot.place)
            slot.owner.free.append(slot)
            self._slot = None
        return self._value

    def __del__(self) -> None:
        if self._slot is not None:  # `wait` was never called
            self._slot.owner.free.append(self._slot)

    def _synchronize(self) -> None:
        if not has_failed():
            try:
                synchronize(self._device)  # the copy may be on any stream
            except RuntimeError as error:
                if not note_failure(error) or not self.has_arrived():
                    raise
        if not self.has_arrived():
            raise DeviceFailed("the device failed before its numbers had reached the host")


class KnownNumber:
    """A number that is already on the host."""

    __slots__ = ("_value",)

    def __init__(self, value: float) -> None:
        self._value = value

    def has_arrived(self, within: float = 0.0) -> bool:
        """Always true."""
        return True

    def wait(self) -> float:
        """The number."""
        return self._value


def begin_reading_number(number: Tensor) -> ArrivingNumber | KnownNumber:
    """Start the copy of one number to the host, with one launch."""
    device = number.device
    number = number.detach()
    if number.dim():
        number = number.reshape(())
    if not has_streams(device):
        return KnownNumber(float(number))
    if number.dtype not in _WORDS:
        number = number.to(torch.float32)
    key = number.dtype, device
    slots = _number_slots.get(key)
    if slots is None:
        slots = _number_slots[key] = _NumberSlots(*key)
    slot = slots.take()
    slot.place.copy_(number, non_blocking=True)
    return ArrivingNumber(slot, device)
