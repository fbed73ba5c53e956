"""The inputs of compiled models and functions, so that bad data can be named when a loss becomes bad.

The graph below the loss of a compiled model is one node that shows nothing of its inputs. So when a compiled call
begins, the range of each of its float tensors is computed: two numbers on a CPU, one launch per tensor and one
asynchronous copy on a GPU. The ranges are read when a loss is not finite, on a GPU possibly some steps later. On a CPU,
the rows of the first non-finite tensor are recorded immediately. On a GPU, they are examined when the loss is known, if
the tensor still exists and has not been written to since.

Not covered: integers, which are always finite; tensors that require gradients, which are not data; calls without
gradients; and what compiled code reads from elsewhere, such as attributes and globals.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from surefoot.core.device import has_failed, has_streams
from surefoot.core.device_copies import begin_reading
from surefoot.core.user_code import place, users_line
from surefoot.core.weak_reference import weak_reference
from surefoot.core.without_hooks import WithoutHooks
from surefoot.observe.readable import is_readable
from surefoot.watch.data_origin import is_finite
from surefoot.watch.nonfinite_origin import bad_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from surefoot.core.device_copies import AsyncCopy
    from surefoot.core.user_code import ScriptLine
    from surefoot.record.facts import NonFiniteLoss
    from surefoot.watch.context import WatchContext
    from surefoot.watch.nonfinite_origin import NonFiniteCounts

MOST_CALLS = 512
"""The number of calls remembered: on a GPU, a loss is known at most that many calls later."""
MOST_TENSORS = 4
"""The maximum number of tensors per call whose range is computed."""
_DEEPEST = 3
_SCALARS = (int, float, bool, str, type(None), torch.nn.Parameter)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

Path = tuple[Any, ...]
"""The path of a tensor among the arguments: a position or a name, then keys and indices."""


@dataclass(slots=True)
class _Input:
    """One float tensor among the arguments of a call."""

    path: Path
    tensor: Callable[[], Tensor | None]
    version: int | None
    shape: list[int]
    dtype: str
    range: tuple[float, float] | None = None
    """The lowest and the highest value, both NaN if one is; `None` while they are being copied, or if they are lost."""
    counts: NonFiniteCounts | None = None
    """The number of non-finite values and their rows, if known."""


@dataclass(slots=True)
class _Call:
    """One call of a compiled model or function."""

    backward: int
    """The number of the backward that follows the call."""
    line: ScriptLine | None
    function: Callable[[], Any]
    inputs: list[_Input]


class CompiledInputs:
    """Records the inputs of the last compiled calls, and finds the one that explains a non-finite loss."""

    def __init__(self, context: WatchContext) -> None:
        self._context, self._state = context, context.state
        self._calls: deque[_Call] = deque(maxlen=MOST_CALLS)
        self._being_copied: deque[tuple[_Call, list[_Input], AsyncCopy]] = deque()
        self._first: dict[tuple[ScriptLine | None, Path], int] = {}
        """For each line and path, the backward after the first call that had a tensor there."""
        self._first_bad: dict[tuple[ScriptLine | None, Path], int] = {}
        """The same for tensors that were not finite."""

    def take(self, function: Any, args: Any, kwargs: Any) -> None:
        """A compiled model or function is about to be called."""
        self._settle()
        if not torch.is_grad_enabled() or has_failed():
            return
        found = list(_float_tensors(args, kwargs))
        if not found:
            return
        line = users_line(sys._getframe())
        inputs = [
            _Input(
                path=path,
                tensor=weak_reference(tensor),
                version=None if tensor.is_inference() else tensor._version,
                shape=list(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
            )
            for path, tensor in found
        ]
        call = _Call(self._state.backwards + 1, line, weak_reference(function), inputs)
        self._calls.append(call)
        with WithoutHooks():
            self._measure(call, [tensor.detach() for _, tensor in found])

    def _measure(self, call: _Call, tensors: list[Tensor]) -> None:
        """Compute the ranges of the tensors of a call, with one copy per device and type."""
        groups: dict[tuple[torch.device, torch.dtype], list[tuple[_Input, Tensor]]] = {}
        for given, tensor in zip(call.inputs, tensors, strict=True):
            groups.setdefault((tensor.device, tensor.dtype), []).append((given, tensor))
        for (device, dtype), members in groups.items():
            inputs = [given for given, _ in members]
            if not has_streams(device):
                for given, tensor in members:
                    given.range = _as_range(*(float(end) for end in torch.aminmax(tensor)))
                self._note(call, inputs)
                for given, tensor in members:
                    if self._first_bad.get((call.line, given.path)) == call.backward:
                        given.counts = bad_rows(tensor)
                continue
            ends = torch.empty(2 * len(members), dtype=dtype, device=device)
            for number, (_, tensor) in enumerate(members):
                torch.aminmax(tensor, out=(ends[2 * number], ends[2 * number + 1]))
            self._being_copied.append((call, inputs, begin_reading(ends)))

    def _settle(self, wait: bool = False) -> None:
        """Read the ranges that have arrived; with `wait`, all of them."""
        while self._being_copied and (wait or self._being_copied[0][2].has_arrived()):
            call, inputs, copy = self._being_copied.popleft()
            try:
                ends = copy.wait().tolist()
            except RuntimeError:
                if has_failed():  # the ranges are lost too
                    continue
                raise
            for number, given in enumerate(inputs):
                given.range = _as_range(*ends[2 * number : 2 * number + 2])
            self._note(call, inputs)

    def _note(self, call: _Call, inputs: list[_Input]) -> None:
        for given in inputs:
            key = call.line, given.path
            self._first.setdefault(key, call.backward)
            if not _is_finite(given):
                self._first_bad.setdefault(key, call.backward)

    def forget_tensors(self) -> None:
        """Drop weak references to tensors."""
        for call in self._calls:
            for given in call.inputs:
                given.tensor = _no_tensor

    # Non-finite losses

    def explain(self, found: NonFiniteLoss, backward: int, is_late: bool = False) -> NonFiniteLoss:
        """Add the first non-finite tensor that a compiled call was given to what is known of a bad loss.

        Waits for the device.

        Args:
            found: What its graph shows.
            backward: The number of its backward.
            is_late: Whether the loss became known only after further steps.
        """
        if found.kind in ("parameter", "data") or not self._calls:
            return found
        self._settle(wait=True)
        calls = [call for call in self._calls if call.backward == backward]
        new = [(call, given) for call in calls for given in call.inputs if self._is_new(call, given)]
        return self._describe(found, *new[0]) if new and self._is_data(is_late) else found

    def _is_new(self, call: _Call, given: _Input) -> bool:
        """Whether a tensor is not finite, and not on purpose, as a mask with -inf is."""
        key = call.line, given.path
        if given.range is None or _is_finite(given) or self._first_bad.get(key, call.backward) < call.backward:
            return False
        is_first = self._first.get(key, call.backward) == call.backward
        return not is_first or math.isnan(given.range[0])

    def _is_data(self, is_late: bool) -> bool:
        """Whether no model can have made it: the output of a model with broken weights is not data."""
        if len(self._context.optimizers.all) > 1 and is_late:
            return False
        trained = (each.tensor() for each in self._context.registry.parameters if each.optimizers)
        return is_late or all(tensor is None or is_finite(tensor) for tensor in trained)

    def _describe(self, found: NonFiniteLoss, call: _Call, given: _Input) -> NonFiniteLoss:
        assert given.range is not None
        line = call.line
        function = call.function()
        described = replace(
            found,
            kind="data",
            op=None,
            inputs=None,
            tensor="input",
            argument=_named(given.path, function),
            dtype=given.dtype,
            shape=given.shape,
            largest=max(given.range, key=abs),
            nan=None,
            inf=None,
            minus_inf=None,
            site=None if line is None else place(line.code.co_filename, line.number),
            call=_name_of(function),
        )
        if given.counts is not None:
            return replace(described, **given.counts)
        tensor = given.tensor()
        is_same = tensor is not None and given.version is not None and tensor._version == given.version
        if tensor is None or not is_same or not is_readable(tensor):
            return described
        with WithoutHooks():
            counts = bad_rows(tensor.detach())
        return replace(described, **counts) if counts["nan"] or counts["inf"] else described


def may_hold_data(args: Any, kwargs: Any) -> bool:
    """Whether there may be float tensors outside any graph among the arguments. Cheap: most calls have none."""
    if torch._C._is_torch_function_mode_enabled():
        return True  # a function mode would see further checks
    for value in (*args, *kwargs.values()):
        kind = type(value)
        if kind is Tensor:
            if not value.requires_grad and value.dtype in _FLOATS:
                return True
        elif kind not in _SCALARS:
            return True
    return False


def _float_tensors(args: Any, kwargs: Any) -> Iterator[tuple[Path, Tensor]]:
    """The first few float tensors among the arguments that are not part of a graph, each with its path."""
    waiting: list[tuple[Path, Any]] = [*(((name,), value) for name, value in [*enumerate(args), *kwargs.items()])]
    found = 0
    while waiting and found < MOST_TENSORS:
        path, value = waiting.pop(0)
        if type(value) is Tensor:
            is_data = value.dtype in _FLOATS and not value.requires_grad and value.layout is torch.strided
            if is_data and value.numel() and is_readable(value):
                found += 1
                yield path, value
        elif len(path) < _DEEPEST and isinstance(value, (list, tuple)):
            waiting.extend(((*path, number), each) for number, each in enumerate(value[:64]))
        elif len(path) < _DEEPEST and isinstance(value, Mapping):
            waiting.extend(((*path, name), each) for name, each in list(value.items())[:64])


def _as_range(low: float, high: float) -> tuple[float, float]:
    return (math.nan, math.nan) if math.isnan(low) or math.isnan(high) else (low, high)


def _is_finite(given: _Input) -> bool:
    return given.range is None or all(math.isfinite(end) for end in given.range)


def _no_tensor() -> None:
    """Replaces a weak reference that was dropped."""


def _name_of(function: Any) -> str:
    """The name of the class or function that was compiled."""
    inner = _inner(function)
    if isinstance(inner, torch.nn.Module):
        return type(inner).__name__
    return getattr(inner, "__name__", None) or "compiled code"


def _inner(function: Any) -> Any:
    """The model or function that was compiled."""
    if isinstance(function, torch.nn.Module):
        return getattr(function, "_orig_mod", function)
    owner = getattr(getattr(function, "_torchdynamo_orig_callable", None), "__self__", None)
    return owner if isinstance(owner, torch.nn.Module) else function


def _named(path: Path, function: Any) -> str:
    """An argument in Python syntax: `x`, or `batch['image']`."""
    first, *inside = path
    words = str(first)
    if isinstance(first, int):
        inner = _inner(function)
        called = inner.forward if isinstance(inner, torch.nn.Module) else inner
        try:
            names = [
                each.name
                for each in inspect.signature(called).parameters.values()
                if each.kind <= each.POSITIONAL_OR_KEYWORD
            ]
        except (TypeError, ValueError):
            names = []
        words = names[first] if first < len(names) else f"argument {first}"
    return words + "".join(f"[{key!r}]" for key in inside)
