"""A call as source code: `F.cross_entropy(logits, target)`, `hidden / norm`, `torch.ops.aten._softmax.default(x, 1,
False)`.

What cannot be written (an object of the program among the arguments, a generator) raises `NotWritable`: the operations
inside are written instead. Arguments with default values are omitted.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import resolve_name

from surefoot.replay.export.call_recorder import Key, Ran

_BINARY = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "matmul": "@", "__pow__": "**", "pow": "**", "gt": ">", "lt": "<",
    "ge": ">=", "le": "<=", "eq": "==", "ne": "!=", "__and__": "&", "__or__": "|", "__xor__": "^", "true_divide": "/",
    "__floordiv__": "//", "remainder": "%",
}  # fmt: skip
_REFLECTED = {
    "__rsub__": "-", "__rtruediv__": "/", "__rdiv__": "/", "__rpow__": "**", "__rmatmul__": "@", "__rmul__": "*",
    "__radd__": "+", "__rfloordiv__": "//",
}  # fmt: skip


class NotWritable(Exception):
    """Something that cannot be written as a line of Python."""


def spell(ran: Ran, of: Callable[[Key], str]) -> str:
    """The call as an expression; `of` names a tensor among its arguments."""
    if ran.is_operation:
        return _operation(ran, of)
    name = resolve_name(ran.func)
    if name is None:
        raise NotWritable(f"{ran.func!r} has no name that can be imported")
    if name.startswith("torch.Tensor."):
        return _method(name.removeprefix("torch.Tensor."), ran, of)
    return f"{_short(name, ran.func)}({_listed(ran, of, 0)})"


def title(ran: Ran) -> str:
    """The name of the call in a sentence: `torch.log`, `F.cross_entropy`, `aten._softmax.default`."""
    if ran.is_operation:
        return str(ran.func)
    name = str(resolve_name(ran.func)).removesuffix(".__get__")
    if name.startswith("torch.Tensor."):
        last = name.rsplit(".", 1)[-1]
        if last == "__getitem__":
            return "indexing"
        plain = {"__rtruediv__": "div", "__rdiv__": "div", "__rsub__": "sub", "__rpow__": "pow", "__pow__": "pow"}
        last = plain.get(last, last)
        return f"torch.{last}" if callable(getattr(torch, last, None)) else f"Tensor.{last}"
    return _short(name, ran.func)


def _short(name: str, func: Any) -> str:
    last = name.rsplit(".", 1)[-1]
    if getattr(torch, last, None) is func:
        return f"torch.{last}"
    if name.startswith("torch.nn.functional."):
        return f"F.{last}"
    if not name.startswith("torch."):
        raise NotWritable(f"{name} is not a function of torch")
    return name


def _method(name: str, ran: Ran, of: Callable[[Key], str]) -> str:
    args = ran.args
    if not args or not isinstance(args[0], Key):
        raise NotWritable(f"Tensor.{name} without a tensor")
    target = of(args[0])
    if name.endswith(".__get__"):
        return f"{target}.{name.removesuffix('.__get__')}"
    if name == "__getitem__":
        return f"{target}[{_index(args[1], of)}]"
    if len(args) == 2 and not ran.kwargs:
        if name in _BINARY:
            return f"{target} {_BINARY[name]} {_operand(args[1], of)}"
        if name in _REFLECTED:
            return f"{_operand(args[1], of)} {_REFLECTED[name]} {target}"
    if name == "neg" and len(args) == 1:
        return f"-{target}"
    if name.startswith("__") and name not in ("__pow__",):
        raise NotWritable(f"Tensor.{name} is a statement, or has no other name")
    return f"{target}.{name}({_listed(ran, of, 1)})"


def _operand(given: Any, of: Callable[[Key], str]) -> str:
    words = value(given, of)
    return f"({words})" if words.startswith("-") else words


def _operation(ran: Ran, of: Callable[[Key], str]) -> str:
    name, overload = str(ran.func._schema.name), ran.func._overloadname
    space, name = name.split("::")
    if space != "aten":
        raise NotWritable(f"{ran.func} is not a function of torch")
    if callable(getattr(torch, name, None)) and not name.startswith("_") and overload != "out":
        return f"torch.{name}({_listed(ran, of, 0)})"
    tensor_first = bool(ran.args) and isinstance(ran.args[0], Key)
    if callable(getattr(Tensor, name, None)) and not name.startswith("_") and tensor_first:
        return f"{of(ran.args[0])}.{name}({_listed(ran, of, 1)})"
    return f"torch.ops.aten.{name}.{overload}({_listed(ran, of, 0)})"


def _listed(ran: Ran, of: Callable[[Key], str], start: int) -> str:
    words = [value(each, of) for each in ran.args[start:]]
    usual = _defaults(ran.func)
    for name, each in ran.kwargs.items():
        if not (name in usual and _same(usual[name], each)):
            words.append(f"{name}={value(each, of)}")
    return ", ".join(words)


def _defaults(func: Any) -> dict[str, object]:
    if not inspect.isfunction(func):
        return {}
    parameters = inspect.signature(func).parameters.values()
    return {each.name: each.default for each in parameters if each.default is not inspect.Parameter.empty}


def _same(usual: Any, given: Any) -> bool:
    return usual is given or (type(usual) is type(given) and isinstance(given, (int, float, str)) and usual == given)


def _index(index: Any, of: Callable[[Key], str]) -> str:
    if isinstance(index, tuple) and index and not isinstance(index, Key):
        text = ", ".join(_index(part, of) for part in index)
        return f"{text}," if len(index) == 1 else text
    if isinstance(index, slice):
        ends = [("" if end is None else value(end, of)) for end in (index.start, index.stop)]
        return ":".join(ends) + ("" if index.step is None else f":{value(index.step, of)}")
    return "..." if index is Ellipsis else value(index, of)


def value(given: Any, of: Callable[[Key], str]) -> str:
    """One argument as source code."""
    if isinstance(given, Key):
        return of(given)
    if given is None or isinstance(given, (bool, str)):
        return repr(given)
    if isinstance(given, int):
        return repr(int(given))
    if isinstance(given, float):
        return repr(float(given)) if math.isfinite(given) else f'float("{float(given)}")'
    if isinstance(given, complex):
        return f"complex({value(given.real, of)}, {value(given.imag, of)})"
    if isinstance(given, (torch.dtype, torch.memory_format, torch.layout)):
        return str(given)
    if isinstance(given, torch.device):
        return repr(str(given))
    if isinstance(given, dict):
        return "{" + ", ".join(f"{key!r}: {value(part, of)}" for key, part in given.items()) + "}"
    if isinstance(given, (list, tuple)):
        text = ", ".join(value(part, of) for part in given)
        if isinstance(given, list):
            return f"[{text}]"
        return f"({text},)" if len(given) == 1 else f"({text})"
    raise NotWritable(f"an argument of type {type(given).__name__} cannot be written to a script")
