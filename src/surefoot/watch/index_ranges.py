"""The ranges of ids and labels on a device, on the host before the kernel that may fail because of them.

An id beyond its table, or a label beyond the classes, ends in a device-side assert: an error that comes later, from
another line, after which no value can be read from the device any more. So before such a call one small kernel takes
the lowest and the highest index, and one asynchronous copy brings both to pinned memory. Work on a stream is done in
order: whenever the kernel that fails has run, its range lies on the host. Nothing waits for the device. That a range
has arrived is told by its memory alone, which held `_ABSENT` before.

Only calls of `torch.nn.functional` are known (`patches/indexing.py`). Indexing by `table[ids]`, `gather`, `scatter` and
`one_hot` is written in C and not seen, nor is what happens inside a compiled function or a CUDA graph. Of a compiled
model, whole numbers that go in are compared with its largest table: what is beyond that fits none.
"""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from surefoot.core.device import has_failed, host_memory_for_good, is_capturing
from surefoot.core.weak_reference import IdentityMap
from surefoot.record.facts import CrashArguments, TensorSummary
from surefoot.watch.script_hooks import WithoutHooks
from surefoot.watch.user_frames import name_of, place, user_frame

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType

    from surefoot.record.facts import CrashFacts
    from surefoot.watch.context import WatchContext

SLOTS = 512
"""Ranges that may be under way. Each takes two launches or more, and a device is behind by about a thousand at most."""
_ABSENT = -(2**62) - 1
COMPILED_MODEL = "compiled model"
_INTEGERS = (torch.int64, torch.int32)


@dataclass(frozen=True)
class IndexedCall:
    """A call that picks rows or classes by index."""

    function: str
    """`embedding`, `embedding_bag`, `cross_entropy` or `nll_loss`; or `COMPILED_MODEL`."""
    size: int
    """The rows of the table, or the number of classes."""
    shape: tuple[int, ...]
    """The shape of the indices."""
    dtype: str
    other_shape: tuple[int, ...]
    """The shape of the table, or of the scores."""
    ignore_index: int | None
    """The label that is left out; `None` for ids."""
    step: int
    code: CodeType | None
    line: int
    parameter: int | None
    """The number of the table among the parameters."""
    name: str
    """What the script calls the indices; empty if they have no name."""


class IndexRanges:
    """Takes the range of the indices of each call, and finds the first one that did not fit."""

    def __init__(self, context: WatchContext) -> None:
        self._state, self._registry = context.state, context.registry
        self._rings: dict[tuple[torch.device, torch.dtype], _Ring] = {}
        self._known: dict[int, tuple[weakref.ref[Tensor], int, int]] = {}
        """The indices that were taken in this step: by identity, with their version and the size they must fit."""
        self._known_step = -1
        self._names: dict[tuple[CodeType, int], str] = {}
        self._tables: IdentityMap[Callable[[], Tensor | None]] = IdentityMap()
        """The largest table of each compiled model, weakly held; `None` if it has none."""

    def take(self, function: str, indices: Tensor, other: Tensor, dim: int, ignore_index: int | None) -> None:
        """`function` is about to be called with indices that pick from a dimension of a table, or of scores."""
        if indices.dtype not in _INTEGERS or not indices.numel() or has_failed():
            return
        size = other.shape[dim] if other.dim() > dim else other.numel()
        if not size or self._is_known(indices, size) or is_capturing(indices.device):
            return
        frame = user_frame()
        call = IndexedCall(
            function=function,
            size=size,
            shape=tuple(indices.shape),
            dtype=str(indices.dtype).removeprefix("torch."),
            other_shape=tuple(other.shape),
            ignore_index=ignore_index,
            step=self._state.steps,
            code=None if frame is None else frame.f_code,
            line=0 if frame is None else frame.f_lineno,
            parameter=self._registry.id_of(other),
            name=self._name(indices, frame),
        )
        key = indices.device, indices.dtype
        if key not in self._rings:
            self._rings[key] = _Ring(*key)
        with WithoutHooks():
            self._rings[key].take(call, indices.detach())

    def take_input(self, indices: Tensor, model: nn.Module) -> None:
        """A compiled model is about to be called with whole numbers, ids or labels."""
        if indices.dtype not in _INTEGERS:
            return
        if self._tables.get(model) is None:
            tables = [part.weight for part in model.modules() if isinstance(part, nn.Embedding)]
            largest = max(tables, key=len, default=None)
            self._tables.set(model, (lambda: None) if largest is None else weakref.ref(largest))
        found = self._tables.get(model)
        table = None if found is None else found()
        if table is not None:
            self.take(COMPILED_MODEL, indices, table, 0, None)

    def _name(self, indices: Tensor, frame: FrameType | None) -> str:
        """What a line of the script calls its indices, looked for when it is first met."""
        if frame is None:
            return ""
        line = frame.f_code, frame.f_lineno
        if line not in self._names:
            self._names[line] = name_of(indices, frame)
        return self._names[line]

    def _is_known(self, indices: Tensor, size: int) -> bool:
        """Whether these very indices were taken in this step: a function mode calls a function twice."""
        if self._state.steps != self._known_step:
            self._known, self._known_step = {}, self._state.steps
        if indices.is_inference():  # has no version
            return False
        reference, version, fits = self._known.get(id(indices), (None, 0, 0))
        if reference is not None and reference() is indices and version == indices._version and fits == size:
            return True
        self._known[id(indices)] = weakref.ref(indices), indices._version, size
        return False

    def forget_tensors(self) -> None:
        """Drop weak references to tensors."""
        self._known = {}

    def first_misfit(self) -> tuple[IndexedCall, int, int] | None:
        """The first call whose indices did not fit, with the lowest and the highest. Asks nothing of the device."""
        found = [misfit for ring in self._rings.values() if (misfit := ring.first_misfit()) is not None]
        return min(found, key=lambda each: each[0].step, default=None)

    def explain(self, crash: CrashFacts) -> CrashFacts:
        """The facts of an error of the device, with the call that was its reason if one is known."""
        misfit = self.first_misfit()
        if misfit is None:
            return replace(crash, calls_checked=sum(ring.arrived() for ring in self._rings.values()))
        call, low, high = misfit
        parameter = None if call.parameter is None else self._registry.parameters[call.parameter]
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


def _arguments(call: IndexedCall, low: int, high: int) -> CrashArguments:
    """The arguments of a call as a crash on a CPU would have them."""
    indices = TensorSummary(shape=list(call.shape), dtype=call.dtype, requires_grad=False, min=low, max=high)
    other = TensorSummary(shape=list(call.other_shape), dtype="float32", requires_grad=True)
    if call.function == COMPILED_MODEL:
        return CrashArguments(indices=indices, weight=other)
    if call.ignore_index is None:
        return CrashArguments(input=indices, weight=other)
    return CrashArguments(input=other, target=indices, ignore_index=call.ignore_index)


class _Ring:
    """Ranges of one device and type, in pinned memory that is used in turn."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._host = host_memory_for_good(2 * SLOTS, dtype, device).view(SLOTS, 2)
        absent = _ABSENT if dtype == torch.int64 else torch.iinfo(dtype).min + 1
        self._host.fill_(absent)
        self._absent = absent
        self._seen: Any = self._host.numpy()
        """The same memory. Reading a number from it is cheaper."""
        with torch._C._InferenceMode(False):
            self._device = torch.zeros(SLOTS, 2, dtype=dtype, device=device)
        self._slots: list[tuple[Tensor, Tensor, Tensor, Tensor]] = [
            (row, row[0], row[1], self._host[number]) for number, row in enumerate(self._device)
        ]
        self._calls: deque[tuple[int, IndexedCall]] = deque()
        """The calls of the slots in use, oldest first, each with the number of its slot."""
        self._next = 0
        self._misfit: tuple[IndexedCall, int, int] | None = None

    def take(self, call: IndexedCall, indices: Tensor) -> None:
        """Launch what brings the range of the indices to the host."""
        if len(self._calls) == SLOTS and not self._retire():
            return  # the device is far behind
        number = self._next
        self._next = (number + 1) % SLOTS
        row, low, high, host = self._slots[number]
        if call.ignore_index is not None:
            indices = indices.masked_fill(indices == call.ignore_index, 0)
        self._seen[number] = self._absent
        torch.aminmax(indices, out=(low, high))
        host.copy_(row, non_blocking=True)
        self._calls.append((number, call))

    def _retire(self) -> bool:
        """Give the oldest slot free; false if its range has not arrived."""
        number, call = self._calls[0]
        low, high = self._seen[number].tolist()
        if self._absent in (low, high):
            return False
        self._calls.popleft()
        if self._misfit is None and not _fits(call, low, high):
            self._misfit = call, low, high
        return True

    def first_misfit(self) -> tuple[IndexedCall, int, int] | None:
        """The oldest call whose indices arrived and did not fit."""
        if self._misfit is not None:
            return self._misfit
        for number, call in self._calls:
            low, high = self._seen[number].tolist()
            if self._absent not in (low, high) and not _fits(call, low, high):
                return call, low, high
        return None

    def arrived(self) -> int:
        """How many of the last ranges are on the host."""
        return sum(self._absent not in self._seen[number].tolist() for number, _ in self._calls)


def _fits(call: IndexedCall, low: int, high: int) -> bool:
    """Whether all indices pick something. Labels of a compiled model may be below 0, to be ignored."""
    return (low >= 0 or call.function == COMPILED_MODEL) and high < call.size
