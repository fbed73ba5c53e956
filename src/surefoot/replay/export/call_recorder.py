"""Records the last calls before one that is known to fail, on two levels.

Torch functions are recorded as the program calls them (`F.cross_entropy(logits, target)`), which is the readable form.
Operations are recorded as torch dispatches them (`aten.nll_loss_forward`), which is what exists inside backward and
inside large functions. Only the last few functions are kept, and no operations, so memory stays that of the step and
autograd behaves as without a recorder.

The step is run twice with a recorder. The first run (`call=None`) finds the function that the bad operation belongs to;
in backward, that is the one that created the autograd node. The second run copies the inputs right before that function
runs, and, in backward, the gradient that arrives at its outputs.

A value is identified by its memory and by how often that memory had been written to (`Key`): an output and the input it
becomes are the same value, a tensor before and after `add_` are two.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils.weak import TensorWeakRef

from surefoot.core.nested import leaves, map_leaves, named_leaves
from surefoot.core.operations import FunctionMode, autograd_node, without_modes
from surefoot.replay.locate.call import make_call
from surefoot.replay.locate.frames import is_code_of_user, look
from surefoot.replay.locate.recorder import OperationRecorder

if TYPE_CHECKING:
    from types import FrameType

    from surefoot.replay.locate.frames import Place
    from surefoot.replay.locate.memory_writes import Memory
    from surefoot.replay.locate.names import Names


WINDOW = 10
"""How many calls before the failure are kept."""
_AUTOGRAD = frozenset(("backward", "grad"))


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


class CallRecorder(OperationRecorder):
    """Records the step like the finder, and captures the operation number `operation`."""

    def __init__(self, names: Names, operation: int, call: int | None = None, *, listens: bool = True) -> None:
        super().__init__(names)
        self.operation, self.call = operation, call
        self.found_call: int | None = None
        """The function call that the operation belongs to."""
        self.in_backward = False
        """Whether autograd was running it."""
        self.captured_call: CapturedCalls | None = None
        self.captured_operation: CapturedCalls | None = None
        self.came_from = 0
        """Bytes of everything that existed before the step and was read: weights, batch, state."""
        self._listener = _Functions(self) if listens else None
        self._recent: deque[Ran] = deque(maxlen=WINDOW)

    def __enter__(self) -> CallRecorder:
        super().__enter__()  # type: ignore[no-untyped-call]
        if self._listener is not None:
            self._listener.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        if self._listener is not None:
            self._listener.__exit__(*error)  # type: ignore[no-untyped-call]
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def on_operation(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run and record an operation, and capture the one that is searched for."""
        number = len(self.calls)
        listener = self._listener
        with torch._C.DisableTorchFunction():
            scene = look(in_backward=autograd_node() is not None)
            ran = remember(func, args, kwargs, operation=True)
            ran.place = scene.place
            ran.is_random = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
            if number == self.operation:
                self._take(ran, args, kwargs)
        if listener is not None and listener.current is not None and ran.is_random:
            listener.current.is_random = True
        out = super().on_operation(func, args, kwargs)
        with torch._C.DisableTorchFunction():
            note_outputs(ran, out)
        if ran.outputs.keys() - ran.inputs.keys():  # not `detach`, which changes nothing
            self._recent.append(ran)
        return out

    def _take(self, ran: Ran, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Capture the inputs of the operation that is searched for, right before it runs."""
        node = autograd_node()
        self.in_backward = node is not None
        call = make_call(ran.func, 0, look(in_backward=False), node, args, kwargs)
        ran.written = [key_of(each.value) for each in call.arguments if each.writes]
        calls = [*self._recent, ran]
        self.captured_operation = CapturedCalls(calls, keep_values(calls), names_of(calls, self._names))
        if self._listener is not None:
            self.found_call = self._listener.call_of(node)

    def _meet(self, tensor: Tensor) -> Memory:
        memory = super()._meet(tensor)
        base = tensor if tensor._base is None else tensor._base
        self.came_from += base.numel() * base.element_size()
        return memory


class _Functions(FunctionMode):
    """Records the torch functions that the program calls."""

    def __init__(self, recorder: CallRecorder) -> None:
        super().__init__()
        self._recorder = recorder
        self._count = 0
        self._recent: deque[Ran] = deque(maxlen=WINDOW)
        self._nodes: list[tuple[int, int, int]] = []  # first and last autograd node of a call, and its number
        self.current: Ran | None = None
        self._number: int | None = None

    def on_function(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run and record a function, and copy the inputs of the one that is searched for."""
        if self.current is not None or getattr(func, "__name__", "") in _AUTOGRAD:
            return func(*args, **kwargs)
        number, self._count = self._count, self._count + 1
        recorder, before = self._recorder, len(self._recorder.calls)
        with without_modes():
            ran = remember(func, args, kwargs, operation=False)
            ran.place = look(in_backward=False).place
            if number == recorder.call:
                calls = [*self._recent, ran]
                recorder.captured_call = CapturedCalls(calls, keep_values(calls), names_of(calls, recorder._names))
        first_node = int(torch._C._autograd._get_sequence_nr())
        self.current, self._number = ran, number
        try:
            out = func(*args, **kwargs)
        finally:
            self.current = None
        ran.operations = len(recorder.calls) - before
        if ran.operations:
            note_outputs(ran, out)
            self._nodes.append((first_node, int(torch._C._autograd._get_sequence_nr()), number))
            if ran.outputs.keys() - ran.inputs.keys():
                self._recent.append(ran)
        if number == recorder.call:
            self._await_gradients(out)
        return out

    def call_of(self, node: Any) -> int | None:
        """The number of the call that is running, or in backward of the one that the node belongs to."""
        if node is None:
            return self._number if self.current is not None else None
        if isinstance(node, BackwardCFunction):
            return None
        made = int(node._sequence_nr())
        return next((number for first, end, number in self._nodes if first <= made < end), None)

    def _await_gradients(self, out: Any) -> None:
        captured = self._recorder.captured_call
        assert captured is not None

        def arrived(path: str, gradient: Tensor | None) -> None:
            if gradient is None:  # of an output that nothing used
                return
            with without_modes():
                captured.upstream[path] = plain_copy(gradient)

        for path, tensor in named_leaves(out):
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient, path=path: arrived(path, gradient))


def remember(func: Any, args: Any, kwargs: Mapping[str, Any], *, operation: bool) -> Ran:
    """A call that is about to run."""
    tensors = list(leaves((args, kwargs)))
    # In backward, autograd behaves differently if a tensor has other references.
    hold: Callable[[Tensor], Callable[[], Tensor | None]] = TensorWeakRef if operation else _held
    inputs = {key_of(tensor): hold(tensor) for tensor in tensors}
    autocast = {}
    if not operation:
        kinds = {tensor.device.type for tensor in tensors}
        autocast = {kind: torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind)}
    wanted = torch.is_grad_enabled()
    needing = [key_of(tensor) for tensor in tensors if wanted and tensor.requires_grad]
    args, kwargs = map_leaves((args, kwargs), key_of)
    return Ran(func, args, kwargs, inputs, None, autocast, needing)


def _held(tensor: Tensor) -> Callable[[], Tensor]:
    return lambda: tensor


def note_outputs(ran: Ran, out: Any) -> None:
    """A call has run."""
    ran.outputs = {key_of(tensor): path for path, tensor in named_leaves(out)}


def names_of(calls: list[Ran], names: Names) -> dict[Key, str]:
    """The program's names of the tensors of some calls: parameters by their path, others by a local variable."""
    found: dict[Key, str] = {}
    for ran in calls:
        for key, held in ran.inputs.items():
            kind, name = names.kinds.get(id(held()), ("", ""))
            if kind in ("parameter", "buffer"):
                found[key] = name.replace(".", "_")
    frames = list(_frames(sys._getframe(1)))
    for frame in sorted(frames, key=lambda frame: not is_code_of_user(frame.f_code.co_filename)):
        for name, value in list(frame.f_locals.items()):
            if isinstance(value, Tensor) and name != "self":
                found.setdefault(key_of(value), name)
    return found


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    """The frames of the stack, innermost first, without surefoot's own."""
    while frame is not None:
        if not str(frame.f_globals.get("__name__", "")).startswith("surefoot."):
            yield frame
        frame = frame.f_back
