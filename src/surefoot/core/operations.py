"""Intercepts the torch functions that a program calls, and the operations that torch runs for them.

There are two levels. A `FunctionMode` receives functions as they are written (`F.cross_entropy(logits, target)`, `x -
y`), whether they are called by a module, by the loss or by the script, but not the functions that they call themselves.
An `OperationMode` receives what torch dispatches below autograd (`aten.nll_loss_forward`), also inside backward. Each
is implemented by one method, which runs the call and returns its result: `on_function` or `on_operation`.

Not covered: the inside of a fused call, and values that leave torch (for example, through NumPy) and return.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, FrameType, FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

if TYPE_CHECKING:
    from torch import nn

_modes: Any = torch.overrides  # its stack of modes has no public name
_OVERRIDES = torch.overrides.__file__

_SAME_FUNCTION = {
    "__add__": "add", "__radd__": "add", "__iadd__": "add", "add_": "add",
    "__sub__": "sub", "__rsub__": "rsub", "__isub__": "sub", "sub_": "sub", "subtract": "sub",
    "__mul__": "mul", "__rmul__": "mul", "__imul__": "mul", "mul_": "mul", "multiply": "mul",
    "__truediv__": "div", "__rtruediv__": "rdiv", "__itruediv__": "div", "div_": "div", "true_divide": "div",
    "__rdiv__": "rdiv", "divide": "div",
    "__pow__": "pow", "__rpow__": "rpow", "pow_": "pow", "float_power": "pow",
    "__neg__": "neg", "negative": "neg", "__matmul__": "matmul", "__getitem__": "getitem",
    "absolute": "abs", "__abs__": "abs", "arccos": "acos", "arcsin": "asin",
    "linalg_norm": "norm", "linalg_vector_norm": "norm", "vector_norm": "norm",
}  # fmt: skip


# ---- names and arguments ------------------------------------------------------------------------------------------


def function_name(func: Any) -> str:
    """The name of a function, equal for all its spellings: `x - y`, `torch.sub` and `x.sub_(y)` are `sub`."""
    name = getattr(func, "__name__", "") or str(func)
    if name == "__get__":  # a property: its owner has its name
        name = getattr(getattr(func, "__self__", None), "__name__", name)
    elif name == "__set__":
        return "_set"
    return _SAME_FUNCTION.get(name, name)


def arguments_by_name(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a function written in Python, with defaults filled in."""
    bound = inspect.signature(func).bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


# ---- functions as they are written --------------------------------------------------------------------------------


class FunctionMode(TorchFunctionMode):
    """While it is entered, every call of a torch function goes through `on_function`."""

    def on_function(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the function and return its result. Functions called inside are not intercepted."""
        raise NotImplementedError

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.on_function(func, args, kwargs or {})

    def leave(self) -> None:
        """Remove it from the stack of modes, at any position."""
        above = []
        while _modes._len_torch_function_stack():
            mode = _modes._pop_mode()
            if mode is self:
                break
            above.append(mode)
        for mode in reversed(above):
            _modes._push_mode(mode)

    def is_on_top(self) -> bool:
        """Whether it is the innermost of this thread's modes."""
        stack = entered_modes()
        return bool(stack) and stack[-1] is self

    def is_entered(self) -> bool:
        """Whether it is among this thread's modes."""
        return any(mode is self for mode in entered_modes())


def entered_modes() -> list[Any]:
    """The function modes of this thread, innermost last."""
    return list(_modes._get_current_function_mode_stack()) if _modes._len_torch_function_stack() else []


def call_as_caller(func: Any, args: Any, kwargs: Any) -> Any:
    """Call a function with the file and line of its caller, which warnings then name."""
    return func(*args, **kwargs)


_codes: dict[tuple[str, int], CodeType] = {}


def called_from(frame: FrameType) -> Callable[[Any, Any, Any], Any]:
    """`call_as_caller`, as if called from where a function was called that was dispatched to a mode."""
    if frame.f_code.co_filename == _OVERRIDES and frame.f_back is not None:  # a function written in Python
        frame = frame.f_back.f_back or frame
    key = frame.f_code.co_filename, frame.f_lineno
    code = _codes.get(key)
    if code is None:
        if len(_codes) > 4096:
            _codes.clear()
        plain = call_as_caller.__code__
        # All of its code is on one line.
        code = plain.replace(co_filename=key[0], co_firstlineno=key[1], co_linetable=_one_line(plain))
        _codes[key] = code
    return FunctionType(code, frame.f_globals)


def _one_line(code: CodeType) -> bytes:
    """A line table that assigns the first line to every instruction."""
    if sys.version_info < (3, 11):
        return bytes((len(code.co_code), 0))
    table, left = bytearray(), len(code.co_code) // 2
    while left:
        count = min(left, 8)
        table += bytes((0x80 | 13 << 3 | count - 1, 0))  # no columns, and no change of the line
        left -= count
    return bytes(table)


# ---- operations as they are dispatched ----------------------------------------------------------------------------


class OperationMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, every operation that torch dispatches goes through `on_operation`."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled in the meantime, so torch need not load its compiler (3 seconds) to exclude this code."""
        return False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def on_operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operation and return its result. Operations run inside are not intercepted."""
        raise NotImplementedError

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.on_operation(func, args, kwargs or {})


def autograd_node() -> Any:
    """The autograd node that is running; `None` in forward."""
    return torch._C._current_autograd_node()


@contextmanager
def without_modes() -> Iterator[None]:
    """Code inside goes through no mode of either level."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


# ---- modules ------------------------------------------------------------------------------------------------------


class RunningModules:
    """The modules of a model that are running, tracked by hooks that are removed at the end.

    `before(name, module, args, kwargs)` and `after(name, module, output)` are called around every call of a module.
    Their own computations go through no mode.
    """

    def __init__(
        self,
        model: nn.Module,
        before: Callable[[str, nn.Module, Any, Any], None],
        after: Callable[[str, nn.Module, Any], None],
    ) -> None:
        self._model, self._before, self._after = model, before, after
        self._running: list[str] = []
        self._handles: list[Any] = []

    @property
    def innermost(self) -> str:
        """The name of the innermost running module; empty for the model itself and outside it."""
        return self._running[-1] if self._running else ""

    def __enter__(self) -> RunningModules:
        for name, module in self._model.named_modules():
            self._handles.append(module.register_forward_pre_hook(self._entered(name), with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._left(name), always_call=True))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _entered(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._running.append(name)
            with without_modes():
                self._before(name, module, args, kwargs)

        return hook

    def _left(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, _: Any, output: Any) -> None:
            if self._running:
                self._running.pop()
            with without_modes():
                self._after(name, module, output)

        return hook
