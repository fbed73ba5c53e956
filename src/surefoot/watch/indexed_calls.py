"""Copies ids, labels and probabilities from a device to the host before the kernel that may fail because of them.

An id outside its table, or a label above the classes, causes a device-side assert: an error that is raised later, at
another line, after which no value can be read from the device. So before such a call, one asynchronous copy brings the
indices to pinned memory; of very many, only the lowest and the highest. Work on a stream is done in order: when the
failing kernel has run, its indices are on the host. Nothing waits for the device, and the indices are read only after a
failure. Memory that still contains `_ABSENT` has not arrived. The lowest and the highest of the values that
`binary_cross_entropy` takes as probabilities are copied in the same way.

Only calls of `torch.nn.functional` are covered (`patches/indexing.py`). `table[ids]`, `gather`, `scatter` and `one_hot`
are implemented in C and not observed, nor is anything inside a compiled function or a CUDA graph. Integer inputs of a
compiled model are compared with its tables: which of them an input belongs to is not known, but one that fits none is
a misfit, and so is the last one before the failure, if no earlier one went beyond the same table.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from surefoot.core.device import has_failed
from surefoot.core.device_copies import permanent_host_memory
from surefoot.core.user_code import place, users_frame
from surefoot.core.weak_reference import IdentityMap
from surefoot.core.without_hooks import WithoutHooks
from surefoot.record.facts import CrashArguments, TensorSummary
from surefoot.watch.user_frames import name_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import CodeType

    from surefoot.record.facts import CrashFacts
    from surefoot.watch.context import WatchContext

SLOTS, FEWEST_SLOTS, RING_BYTES = 128, 32, 4 << 20
"""Calls whose indices are kept, for each size: a device lags by about a thousand launches, at least 30 a step."""
MOST_COPIED = 1 << 15
"""Above this number of indices, only the range is copied."""
_ABSENT = {torch.int64: -(2**62) - 1, torch.int32: -(2**31) + 1, torch.float32: -(2.0**126)}
PROBABILITIES = "binary_cross_entropy"
COMPILED_MODEL = "compiled model"
_INTEGERS = (torch.int64, torch.int32)
_LEAST_SIZE = 64
"""Rings have sizes that are powers of two, starting with this one."""


class _Table(NamedTuple):
    """What indices pick from: the rows of an embedding, or classes."""

    size: int
    """The number of rows or classes; 1 for probabilities."""
    shape: torch.Size
    """The shape of the table, or of the scores."""
    parameter: int | None
    """The number of the parameter that is the table."""


class IndexedCall(NamedTuple):
    """A call that picks rows or classes by index, or takes values for probabilities."""

    number: int
    """The number of calls recorded before it."""
    function: str
    """`embedding`, `embedding_bag`, `cross_entropy` or `nll_loss`; or `COMPILED_MODEL`; or `PROBABILITIES`."""
    table: _Table
    smaller: tuple[_Table, ...]
    """The other tables of a compiled model, the larger ones first."""
    shape: torch.Size
    """The shape of the indices."""
    dtype: torch.dtype
    ignore_index: int | None
    """The label that is ignored; `None` for ids."""
    step: int
    code: CodeType | None
    line: int
    name: str
    """The variable of the script that holds the indices; empty if there is none."""


class IndexedCalls:
    """Copies the indices of each call, and finds the first call with an index out of range."""

    def __init__(self, context: WatchContext) -> None:
        self._state, self._registry = context.state, context.registry
        self._rings: dict[tuple[torch.device, torch.dtype, int], _Ring] = {}
        self._taken = 0
        self._known: dict[int, tuple[weakref.ref[Tensor], int, int]] = {}
        """The indices taken in this step, by identity, with their version and the size that they must fit."""
        self._known_step = -1
        self._names: dict[tuple[CodeType | None, int], str] = {}
        self._tables: IdentityMap[tuple[_Table, ...]] = IdentityMap()
        """The tables of each compiled model, the larger ones first."""

    def take(self, function: str, indices: Tensor, other: Tensor, dim: int, ignore_index: int | None) -> None:
        """`function` is about to be called with indices into a dimension of a table, or of scores.

        The current stream is not being captured into a graph.
        """
        if indices.dtype not in _INTEGERS or not indices.numel() or has_failed():
            return
        shape = other.shape
        size = shape[dim] if len(shape) > dim else other.numel()
        if size and not self._is_known(indices, size):
            table = _Table(size, shape, self._registry.id_of(other))
            self._copy(self._noted(function, indices, ignore_index, table), indices.detach())

    def take_probabilities(self, values: Tensor) -> None:
        """`binary_cross_entropy` is about to be called with values that must lie between 0 and 1."""
        if not values.is_floating_point() or not values.numel() or has_failed():
            return
        call = self._noted(PROBABILITIES, values, None, _Table(1, values.shape, None))
        with WithoutHooks():
            self._copy(call, torch.stack(torch.aminmax(values.detach())).float())

    def _noted(self, function: str, indices: Tensor, ignore_index: int | None, *tables: _Table) -> IndexedCall:
        frame = users_frame(sys._getframe(1))
        code, line = (None, 0) if frame is None else (frame.f_code, frame.f_lineno)
        name = self._names.get((code, line))
        if name is None:  # the variable that holds the indices is searched when the line is first executed
            name = self._names[code, line] = name_of(indices, frame)
        self._taken += 1
        shape, dtype, step = indices.shape, indices.dtype, self._state.steps
        return IndexedCall(
            self._taken - 1, function, tables[0], tables[1:], shape, dtype, ignore_index, step, code, line, name
        )

    def _copy(self, call: IndexedCall, indices: Tensor) -> None:
        count = indices.numel()
        if count > MOST_COPIED:
            if call.ignore_index is not None:
                indices = indices.masked_fill(indices == call.ignore_index, 0)
            indices, count = torch.stack(torch.aminmax(indices)), 2
        key = indices.device, indices.dtype, max(_LEAST_SIZE, 1 << (count - 1).bit_length())
        ring = self._rings.get(key)
        if ring is None:
            ring = self._rings[key] = _Ring(*key)
        ring.take(call, indices, count)

    def take_input(self, indices: Tensor, model: nn.Module) -> None:
        """A compiled model is about to be called with integers: ids or labels."""
        if indices.dtype not in _INTEGERS or not indices.numel() or has_failed():
            return
        tables = self._tables.get(model)
        if tables is None:
            found = [part.weight for part in model.modules() if isinstance(part, nn.Embedding)]
            tables = tuple(_Table(len(each), each.shape, self._registry.id_of(each)) for each in found)
            self._tables.set(model, tables := tuple(sorted(tables, key=_size, reverse=True)))
        if tables and not self._is_known(indices, tables[0].size):
            self._copy(self._noted(COMPILED_MODEL, indices, None, *tables), indices.detach())

    def _is_known(self, indices: Tensor, size: int) -> bool:
        """Whether the same indices were already taken in this step: a function mode calls a function twice."""
        if self._state.steps != self._known_step:
            self._known, self._known_step = {}, self._state.steps
        if indices.is_inference():  # has no version
            return False
        number, version = id(indices), indices._version
        known = self._known.get(number)
        if known is not None and known[0]() is indices and known[1:] == (version, size):
            return True
        self._known[number] = weakref.ref(indices), version, size
        return False

    def forget_tensors(self) -> None:
        """Drop weak references to tensors."""
        self._known = {}

    def first_misfit(self) -> tuple[IndexedCall, float, float] | None:
        """The first call with an index out of range, with the lowest and highest index. Does not access the device."""
        ranges = sorted((each for ring in self._rings.values() for each in ring.ranges()), key=_number)
        found = next(((call, low, high) for call, low, high in ranges if not _fits(call, low, high)), None)
        return found or _last_beyond_a_smaller_table([each for each in ranges if each[0].function == COMPILED_MODEL])

    def explain(self, crash: CrashFacts) -> CrashFacts:
        """Add the call that caused a device error to its facts, if it is known."""
        misfit = self.first_misfit()
        if misfit is None:
            return replace(crash, calls_checked=sum(ring.arrived() for ring in self._rings.values()))
        call, low, high = misfit
        parameter = None if call.table.parameter is None else self._registry.parameters[call.table.parameter]
        return replace(
            crash,
            site=crash.site if call.code is None else place(call.code.co_filename, call.line),
            function=crash.function if call.code is None else call.code.co_name,
            call=call.function,
            arguments=_arguments(call, low, high),
            locals=None,
            step=call.step,
            reported_at=crash.site,
            table=None if parameter is None else self._registry.label(parameter),
            indices=call.name or None,
        )


def _arguments(call: IndexedCall, low: float, high: float) -> CrashArguments:
    """The arguments of a call, as in the facts of a crash on a CPU."""
    is_probability = call.function == PROBABILITIES
    is_finite = math.isfinite(low) and math.isfinite(high)
    indices = TensorSummary(
        shape=list(call.shape),
        dtype=str(call.dtype).removeprefix("torch."),
        requires_grad=is_probability,
        nonfinite=int(not is_finite) if is_probability else None,
        min=low if is_finite else None,
        max=high if is_finite else None,
    )
    if is_probability:
        return CrashArguments(input=indices)
    other = TensorSummary(shape=list(call.table.shape), dtype="float32", requires_grad=True)
    if call.function == COMPILED_MODEL:
        return CrashArguments(indices=indices, weight=other)
    if call.ignore_index is None:
        return CrashArguments(input=indices, weight=other)
    return CrashArguments(input=other, target=indices, ignore_index=call.ignore_index)


class _IndexMemory:
    """Pinned memory for the indices of one call, as a tensor and as an array that can be read without calling torch."""

    __slots__ = ("_memory", "_shape", "_view", "seen")

    def __init__(self, memory: Tensor) -> None:
        self._memory, self.seen = memory, memory.numpy()
        self._view, self._shape = memory, memory.shape

    def begin_copy(self, indices: Tensor, count: int) -> None:
        """Start the copy to the host. The view of the memory is kept: most calls have the shape of the last one."""
        shape = indices.shape
        if shape != self._shape:
            self._view, self._shape = self._memory[:count].view(shape), shape
        self._view.copy_(indices, non_blocking=True)


class _Ring:
    """The indices, or ranges, of the last calls with one device, type and size, in reused memory."""

    def __init__(self, device: torch.device, dtype: torch.dtype, capacity: int) -> None:
        self._device, self._dtype, self._capacity = device, dtype, capacity
        self.length = min(SLOTS, max(FEWEST_SLOTS, RING_BYTES // (capacity * dtype.itemsize)))
        self._absent = _ABSENT[dtype]
        self._slots: list[_IndexMemory] = []
        self.calls: deque[tuple[_IndexMemory, int, IndexedCall]] = deque(maxlen=self.length)
        """The last calls, oldest first, each with its memory and its number of indices."""
        self._next = 0

    def take(self, call: IndexedCall, indices: Tensor, count: int) -> None:
        """Start the copy of so many indices to the host."""
        if len(self.calls) == self.length and not self._has_arrived(*self.calls[0][:2]):
            return  # the device lags so far behind that it has not yet written to this memory
        if self._next == len(self._slots):
            self._slots.append(_IndexMemory(permanent_host_memory(self._capacity, self._dtype, self._device)))
        slot = self._slots[self._next]
        self._next = (self._next + 1) % self.length
        slot.seen[0] = slot.seen[count - 1] = self._absent
        slot.begin_copy(indices, count)
        self.calls.append((slot, count, call))

    def ranges(self) -> Iterator[tuple[IndexedCall, float, float]]:
        """The calls whose indices have arrived, oldest first, each with its lowest and highest index."""
        for slot, count, call in self.calls:
            if self._has_arrived(slot, count):
                values = slot.seen[:count]
                if call.ignore_index is not None:
                    values = values[values != call.ignore_index]
                low, high = (values.min().item(), values.max().item()) if len(values) else (0, 0)
                yield call, low, high

    def _has_arrived(self, slot: _IndexMemory, count: int) -> bool:
        return self._absent not in (slot.seen[0], slot.seen[count - 1])

    def arrived(self) -> int:
        """The number of the last calls whose indices are on the host."""
        return sum(self._has_arrived(slot, count) for slot, count, _ in self.calls)


def _fits(call: IndexedCall, low: float, high: float) -> bool:
    """Whether all indices are in range. Labels of a compiled model may be negative, to be ignored."""
    if call.function == PROBABILITIES:
        return low >= 0 and high <= 1
    return (low >= 0 or call.function == COMPILED_MODEL) and high < call.table.size


def _last_beyond_a_smaller_table(
    ranges: list[tuple[IndexedCall, float, float]],
) -> tuple[IndexedCall, float, float] | None:
    """The call of the last step whose indices are the first to go beyond one of the smaller tables of its model.

    Nothing arrives after the failure, and an earlier call that went beyond the same table did not fail. Of several
    tables, it is the largest.
    """
    tables = sorted({table for call, _, _ in ranges for table in call.smaller}, key=_size, reverse=True)
    for table in tables:
        first = next((each for each in ranges if table in each[0].smaller and each[2] >= table.size), None)
        if first is not None and first[0].step == ranges[-1][0].step:
            call, low, high = first
            return call._replace(table=table), low, high
    return None


def _size(table: _Table) -> int:
    return table.size


def _number(found: tuple[IndexedCall, float, float]) -> int:
    return found[0].number
