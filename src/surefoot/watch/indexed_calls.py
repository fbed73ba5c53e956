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
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from surefoot.core.device import has_failed
from surefoot.core.device_copies import permanent_host_memory
from surefoot.core.user_code import place, users_frame, users_line
from surefoot.core.weak_reference import IdentityMap
from surefoot.core.without_hooks import WithoutHooks
from surefoot.record.facts import CrashArguments, TensorSummary
from surefoot.watch.user_frames import name_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from surefoot.core.user_code import ScriptLine
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
MOST_PLANS = 512
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
    line: ScriptLine | None
    name: str
    """The variable of the script that holds the indices; empty if there is none."""


class _CopyPlan(NamedTuple):
    """What is the same in all calls of one line with tensors of the same shapes: a call only copies its indices."""

    call: IndexedCall
    """The call, without its number and step."""
    ring: _Ring
    copied: int
    """How many numbers are copied: the indices, or the lowest and the highest."""
    is_range: bool
    """Whether only the lowest and the highest are copied."""


class IndexedCalls:
    """Copies the indices of each call, and finds the first call with an index out of range."""

    def __init__(self, context: WatchContext) -> None:
        self._state, self._registry = context.state, context.registry
        self._rings: dict[tuple[torch.device, torch.dtype, int], _Ring] = {}
        self._taken = 0
        self._known: dict[int, tuple[weakref.ref[Tensor], int, int]] = {}
        """The indices taken in this step, by identity, with their version and the size that they must fit."""
        self._known_step = -1
        self._names: dict[ScriptLine | None, str] = {}
        self._plans: dict[tuple[Any, ...], _CopyPlan] = {}
        """For each line, and the shapes, types and tables in its calls."""
        self._tables: IdentityMap[tuple[int, tuple[_Table, ...]]] = IdentityMap()
        """The tables of each compiled model, the larger ones first, and its number among all compiled models."""
        self._models = 0

    def take(self, function: str, indices: Tensor, other: Tensor, dim: int, ignore_index: int | None) -> None:
        """`function` is about to be called with indices into a dimension of a table, or of scores.

        The current stream is not being captured into a graph.
        """
        dtype, shape = indices.dtype, other.shape
        if dtype not in _INTEGERS:
            return
        parameter = self._registry.id_of(other) if ignore_index is None else None  # scores are no parameter
        line = users_line(sys._getframe(1))
        key = function, line, indices.shape, shape, dtype, indices.device, parameter, ignore_index
        plan = self._plans.get(key)
        if plan is None:
            size = shape[dim] if len(shape) > dim else other.numel()
            if not size or not indices.numel():
                return
            table = _Table(size, shape, parameter)
            plan = self._planned(key, function, indices, line, ignore_index, table)
        self._copy(plan, indices)

    def take_inputs(self, given: Iterable[Tensor], model: nn.Module) -> None:
        """A compiled model is about to be called. Integers on a device are ids or labels."""
        number, tables = self._tables.get(model) or self._tables_of(model)
        if not tables:
            return
        line = users_line(sys._getframe(1))
        for indices in given:
            dtype = indices.dtype
            if dtype not in _INTEGERS:
                continue
            key = COMPILED_MODEL, line, indices.shape, dtype, indices.device, number
            plan = self._plans.get(key)
            if plan is None:
                if not indices.numel():
                    continue
                plan = self._planned(key, COMPILED_MODEL, indices, line, None, *tables)
            self._copy(plan, indices)

    def take_probabilities(self, values: Tensor) -> None:
        """`binary_cross_entropy` is about to be called with values that must lie between 0 and 1."""
        if not values.is_floating_point() or not values.numel() or has_failed():
            return
        with WithoutHooks():
            ends = torch.stack(torch.aminmax(values.detach())).float()
        line, table = users_line(sys._getframe(1)), _Table(1, values.shape, None)
        key = PROBABILITIES, line, values.shape, values.dtype, values.device
        plan = self._plans.get(key) or self._planned(key, PROBABILITIES, values, line, None, table)
        self._taken += 1
        plan.ring.take(plan, ends, self._taken - 1, self._state.steps)

    def _planned(
        self,
        key: tuple[Any, ...],
        function: str,
        indices: Tensor,
        line: ScriptLine | None,
        ignore_index: int | None,
        *tables: _Table,
    ) -> _CopyPlan:
        name = self._names.get(line)
        if name is None:  # the variable that holds the indices is searched when the line is first executed
            name = self._names[line] = name_of(indices, users_frame(sys._getframe(2)))
        shape, dtype, count = indices.shape, indices.dtype, indices.numel()
        call = IndexedCall(-1, function, tables[0], tables[1:], shape, dtype, ignore_index, -1, line, name)
        is_range = count > MOST_COPIED or function == PROBABILITIES
        if is_range:
            count = 2
        if function == PROBABILITIES:
            dtype = torch.float32
        place = indices.device, dtype, max(_LEAST_SIZE, 1 << (count - 1).bit_length())
        ring = self._rings.get(place)
        if ring is None:
            ring = self._rings[place] = _Ring(*place)
        if len(self._plans) >= MOST_PLANS:
            self._plans.clear()
        plan = self._plans[key] = _CopyPlan(call, ring, count, is_range)
        return plan

    def _copy(self, plan: _CopyPlan, indices: Tensor) -> None:
        """Start the copy of indices, unless they were already taken in this step: a function mode calls twice."""
        if has_failed():
            return
        step = self._state.steps
        if step != self._known_step:
            self._known, self._known_step = {}, step
        try:
            number, expected = id(indices), (indices._version, plan.call.table.size)
            known = self._known.get(number)
            if known is not None and known[0]() is indices and known[1:] == expected:
                return
            self._known[number] = weakref.ref(indices), *expected
        except RuntimeError:  # a tensor that was made in inference mode has no version
            pass
        if plan.is_range:
            ignored = plan.call.ignore_index
            if ignored is not None:
                indices = indices.masked_fill(indices == ignored, 0)
            indices = torch.stack(torch.aminmax(indices))
        self._taken += 1
        plan.ring.take(plan, indices, self._taken - 1, step)

    def _tables_of(self, model: nn.Module) -> tuple[int, tuple[_Table, ...]]:
        found = [part.weight for part in model.modules() if isinstance(part, nn.Embedding)]
        tables = [_Table(len(each), each.shape, self._registry.id_of(each)) for each in found]
        self._models += 1
        known = self._models, tuple(sorted(tables, key=_size, reverse=True))
        self._tables.set(model, known)
        return known

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
            site=crash.site if call.line is None else place(call.line.code.co_filename, call.line.number),
            function=crash.function if call.line is None else call.line.code.co_name,
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

    __slots__ = ("memory", "seen", "shape", "view")

    def __init__(self, memory: Tensor) -> None:
        self.memory, self.seen = memory, memory.numpy()
        self.view, self.shape = memory, memory.shape


class _Ring:
    """The indices, or ranges, of the last calls with one device, type and size, in reused memory."""

    def __init__(self, device: torch.device, dtype: torch.dtype, capacity: int) -> None:
        self._device, self._dtype, self._capacity = device, dtype, capacity
        self.length = min(SLOTS, max(FEWEST_SLOTS, RING_BYTES // (capacity * dtype.itemsize)))
        self._absent = _ABSENT[dtype]
        self.calls: deque[tuple[_IndexMemory, _CopyPlan, int, int]] = deque(maxlen=self.length)
        """The last calls, oldest first: the memory of each, its plan, its number and its step."""
        self._is_full = False

    def take(self, plan: _CopyPlan, indices: Tensor, number: int, step: int) -> None:
        """Start the copy of the indices of a call to the host."""
        calls, count, absent = self.calls, plan.copied, self._absent
        if self._is_full:
            slot = calls[0][0]
            seen = slot.seen
            if absent in (seen[0], seen[calls[0][1].copied - 1]):
                return  # the device lags so far behind that it has not yet written to this memory
        else:
            slot = _IndexMemory(permanent_host_memory(self._capacity, self._dtype, self._device))
            seen = slot.seen
            self._is_full = len(calls) + 1 == self.length
        seen[0] = seen[count - 1] = absent
        shape = indices.shape
        if shape != slot.shape:  # most calls have the shape of the last one
            slot.view, slot.shape = slot.memory[:count].view(shape), shape
        slot.view.copy_(indices, non_blocking=True)
        calls.append((slot, plan, number, step))

    def ranges(self) -> Iterator[tuple[IndexedCall, float, float]]:
        """The calls whose indices have arrived, oldest first, each with its lowest and highest index."""
        for slot, plan, number, step in self.calls:
            if self._has_arrived(slot, plan.copied):
                values, call = slot.seen[: plan.copied], plan.call._replace(number=number, step=step)
                if call.ignore_index is not None:
                    values = values[values != call.ignore_index]
                low, high = (values.min().item(), values.max().item()) if len(values) else (0, 0)
                yield call, low, high

    def _has_arrived(self, slot: _IndexMemory, count: int) -> bool:
        return self._absent not in (slot.seen[0], slot.seen[count - 1])

    def arrived(self) -> int:
        """The number of the last calls whose indices are on the host."""
        return sum(self._has_arrived(slot, plan.copied) for slot, plan, *_ in self.calls)


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
