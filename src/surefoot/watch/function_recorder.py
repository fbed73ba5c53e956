"""Records the torch functions that a step called: the name, the line of the user's code, the inputs and the result.

The mode sees the calls as they are written (`F.cross_entropy`, `x - y`, `t.detach()`), not the kernels below. It is on
during a sampled step only. Tensors are held weakly, so nothing lives longer than it would have.
"""

from __future__ import annotations

import heapq
import sys
import weakref
from dataclasses import dataclass, field
from types import MethodWrapperType
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from surefoot.core.nested import leaves
from surefoot.core.operations import FunctionMode, called_from, entered_modes, function_name
from surefoot.core.user_code import place, users_frame
from surefoot.core.without_hooks import intercepts_operations, runs_eagerly
from surefoot.watch import autograd_graph as graph

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MOST_ENTRIES = 20_000

BREAKS = frozenset({"detach", "detach_", "data", "tensor", "as_tensor", "item", "numpy", "tolist", "from_numpy"})
"""Calls that gradients do not flow through."""

_SILENT = frozenset(
    {
        "size", "dim", "shape", "dtype", "device", "requires_grad", "grad", "grad_fn", "is_leaf", "ndim", "numel",
        "layout", "is_cuda", "is_sparse", "is_floating_point", "is_complex", "__len__", "is_nested", "is_meta",
        "_version", "data_ptr", "stride", "is_contiguous", "is_quantized", "names", "backward", "register_hook",
        "retain_grad", "storage_offset", "element_size", "nelement", "is_mkldnn", "__hash__", "__format__", "__repr__",
        "is_inference", "is_same_size", "requires_grad_", "zero_", "uniform_", "normal_", "trunc_normal_",
        "_set_grad_enabled",
    }
)  # fmt: skip


_PLAIN_TENSORS = (Tensor, nn.Parameter)
_NO_TENSORS = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.Size, slice)


def unchanged(func: Any) -> Any:
    """Returns the function unchanged."""
    return func


original_of: Callable[[Any], Any] = unchanged
"""Maps a function that reached the recorder to the one to call; `patches` sets it to `Originals.original_of`."""


class _ResultFacts(TypedDict):
    bad: bool
    given_finite: bool | None


class DomainFacts(_ResultFacts, total=False):
    """Fields of `UngraphedCall` about the values that the call was given and returned."""

    nan: int
    inf: int
    of: int
    lowest: float | None


@dataclass(slots=True)
class CallNotes:
    """What the probes record about a call until the end of the step."""

    scalar: tuple[Tensor, int] | None = None
    """The result, detached, and its index among the outputs of its node, if it has one element."""
    ids: Tensor | None = None
    """The indices that an embedding looked up."""
    constant: float | None = None
    """The constant that the call multiplied by."""
    divisor: Any = None
    """The divisor, if it is a tensor of one element without a gradient; it may be read later."""
    domain: DomainFacts | None = None
    """For a call without a graph whose function has a restricted domain."""


@dataclass
class RecordedCall:
    """One call."""

    name: str
    index: int
    filename: str
    line: int
    inputs: list[int]
    """The entries that made its input tensors; a tensor that was not made by a recorded call has none."""
    grads: list[bool]
    """For each input tensor, whether it required a gradient."""
    module: str = ""
    grad_enabled: bool = True
    in_shape: list[int] | None = None
    """The shape of the first input tensor."""
    out_shape: list[int] | None = None
    out_grad: bool = False
    out_dtype: str = ""
    notes: CallNotes = field(default_factory=CallNotes)
    parameters: list[int] = field(default_factory=list)
    """The numbers of the parameters among the input tensors."""
    kind: str = ""
    """The operation of the result's autograd node; the node itself is marked with the index of the entry."""
    result: Any = None
    """Weak reference to the result."""
    taken: list[Any] = field(default_factory=list)
    """Weak references to the input tensors."""

    @property
    def site(self) -> str:
        """The user's file and line."""
        return place(self.filename, self.line) if self.filename else ""


def tensors_in(values: Any, depth: int = 3) -> Iterator[Tensor]:
    """Every ordinary tensor in nested lists, tuples and dictionaries.

    Left out are tensors without a shape, lists of tensors, and classes that intercept operations.
    """
    for value in values if type(values) is tuple else (values,):  # arguments, or a result: most are plain
        if type(value) in _PLAIN_TENSORS:
            if not value.is_nested:
                yield value
        elif type(value) not in _NO_TENSORS:
            for tensor in leaves(value, deepest=depth - (value is not values), longest=64):
                if not is_lazy(tensor) and not intercepts_operations(tensor) and not tensor.is_nested:
                    yield tensor


class FunctionRecorder(FunctionMode):
    """Records calls while it is entered. `watch(entry, args, kwargs, out, tensors)` may add to the entry.

    `tensors` contains all inputs and results. The function must not raise.
    """

    def __init__(
        self,
        watch: Callable[[RecordedCall, tuple[Any, ...], dict[str, Any], Any, list[Tensor]], None],
        safely: Callable[..., Any],
    ) -> None:
        super().__init__()
        self._safely = safely
        self.entries: list[RecordedCall] = []
        self.mark = object()
        """The owner of the numbers that mark autograd nodes."""
        self.paused = 0
        self.in_step = False
        """True during a step of an optimizer, whose operations are not the script's."""
        self.has_closure = False
        """Whether the optimizer calls a closure of the script. Its own operations run without gradients."""
        self.module = ""
        self._is_aside = False
        self._watch = watch
        self._made_by: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._names: dict[Any, tuple[Any, str, Any]] = {}
        """Functions with their names and originals, by identity: some functions have a hash written in Python."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        key: Any = id(func)
        if type(func) is MethodWrapperType:  # the getter of a property: a new object at each access
            key = id(func.__self__), func.__name__
        known = self._names.get(key)
        if known is None:
            known = self._names[key] = func, function_name(func), original_of(func)
        out = called_from(sys._getframe(1))(known[2], args, kwargs or {})
        if self.paused or len(self.entries) >= MOST_ENTRIES or not runs_eagerly():
            return out
        if self.in_step and not (self.has_closure and torch.is_grad_enabled()):
            return out
        if known[1] not in _SILENT:
            self._safely("operations", self._record, func, known[1], args, kwargs or {}, out)
        return out

    def enter_step(self, has_closure: bool) -> None:
        """An optimizer begins its step; `has_closure` is true if it calls the script."""
        self.in_step, self.has_closure = True, has_closure
        if not has_closure:
            self.set_aside()

    def leave_step(self) -> None:
        """The step of the optimizer has ended, possibly with an exception."""
        self.in_step = False
        self.take_up()

    def set_aside(self) -> bool:
        """Leave the modes for the time of a function of torch that reads each parameter; whether it was entered.

        A mode costs each access to `parameter.grad` a hundred times its own time. `take_up` ends it.
        """
        if not self._is_aside and self.is_on_top():
            self._is_aside = True
            self.leave()
            return True
        return False

    def take_up(self) -> None:
        """Enter the modes again, unless the sampled step has ended in the meantime."""
        if self._is_aside:
            self._is_aside = False
            if not self.paused:
                self.__enter__()  # type: ignore[no-untyped-call]

    def origins(self) -> dict[str, list[tuple[str, str, str]]]:
        """For each kind of autograd node: the site, module and name of the recorded calls, in order."""
        found: dict[str, list[tuple[str, str, str]]] = {}
        for entry in self.entries:
            if entry.kind:
                found.setdefault(entry.kind, []).append((entry.site, entry.module, entry.name))
        return found

    def forget(self) -> None:
        """Drop the references to tensors, and keep the records."""
        self._made_by.clear()
        for entry in self.entries:
            entry.taken, entry.result = [], None

    def _record(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        taken = [*tensors_in(args), *tensors_in(kwargs)] if kwargs else list(tensors_in(args))
        made = list(tensors_in(out))
        first = made[0] if made else None
        if first is None and name not in BREAKS:
            return
        frame = users_frame(sys._getframe(3))
        entry = RecordedCall(
            name=name,
            index=len(self.entries),
            filename=frame.f_code.co_filename if frame is not None else "",
            line=frame.f_lineno if frame is not None else 0,
            inputs=[index for tensor in taken if (index := self.maker(tensor)) is not None],
            grads=[tensor.requires_grad for tensor in taken],
            module=self.module,
            grad_enabled=torch.is_grad_enabled(),
            in_shape=list(taken[0].shape) if taken else None,
            taken=[weakref.ref(tensor) for tensor in taken],
        )
        if first is not None:
            entry.out_shape = list(first.shape)
            entry.out_grad = first.requires_grad
            entry.out_dtype = str(first.dtype).removeprefix("torch.")
            if (node := graph.node_of(first)) is not None:
                entry.kind = graph.op(node)
                graph.mark(node, self.mark, entry.index)
            entry.result = weakref.ref(first)
        self.entries.append(entry)
        for tensor in made:
            self._made_by[id(tensor)] = (weakref.ref(tensor), entry.index)
        if not any(
            type(value) not in _PLAIN_TENSORS and isinstance(value, Tensor) and intercepts_operations(value)
            for value in (*args, *kwargs.values(), out)
        ):
            self._watch(entry, args, kwargs, out, [*taken, *made])

    def maker(self, tensor: Tensor) -> int | None:
        """The entry that made a tensor, if it was recorded."""
        known = self._made_by.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else None

    def fills_gradients(self) -> bool:
        """Whether a backward would fill the `grad` of a result because of `retain_grad`."""
        held = (
            tensor
            for entry in self.entries
            for ref in (entry.result, *entry.taken)
            if ref and (tensor := ref()) is not None
        )
        return any(tensor.retains_grad and not tensor.is_leaf for tensor in held)

    def history(self, start: int | None, limit: int = 400) -> Iterator[RecordedCall]:
        """The entries that a result was made from, nearest first, including its own."""
        waiting = [] if start is None else [-start]  # a heap gives the smallest first
        seen: set[int] = set()
        while waiting and len(seen) < limit:
            index = -heapq.heappop(waiting)
            if index in seen:
                continue
            seen.add(index)
            yield self.entries[index]
            for made_from in self.entries[index].inputs:
                if made_from not in seen:
                    heapq.heappush(waiting, -made_from)


def remove_leftover_recorders() -> None:
    """Remove recorders that could not be removed at the end of their sampled step because they were in use."""
    for mode in entered_modes():
        if isinstance(mode, FunctionRecorder):
            mode.leave()
