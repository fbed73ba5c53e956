"""The program's names for its tensors and modules.

The names of parameters and buffers come from the model; all others from the variables that `step_fn` can reach (its
closure, its defaults, the globals it uses) and from the local variables of the frame that first uses a tensor.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from types import FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.core.nested import nearest_leaves
from surefoot.replay.locate.describe import Counts, describe
from surefoot.replay.locate.frames import is_code_of_user
from surefoot.replay.locate.memory_writes import MemoryWrite

_MOST_HELD = 1_000
_DEEPEST = 4
_NO_HOLDERS = (nn.Module, torch.optim.Optimizer, ModuleType, type)  # their tensors have names of their own


class Names:
    """Names for the tensors and modules of one step."""

    def __init__(self, step_fn: Callable[[], Any], model: nn.Module | None, optimizer: Any = None) -> None:
        reached = _reached(step_fn)
        self.modules: dict[str, nn.Module] = {"": model} if model is not None else {}
        self.optimizers = [optimizer] if optimizer is not None else []
        self.generators = [value for value in reached.values() if isinstance(value, torch.Generator)]
        for name, value in reached.items():
            if isinstance(value, nn.Module) and value not in self.modules.values():
                self.modules[name] = value
            if isinstance(value, torch.optim.Optimizer) and value not in self.optimizers:
                self.optimizers.append(value)
        inner = {id(part) for root in self.modules.values() for part in root.modules() if part is not root}
        self.modules = {name: root for name, root in self.modules.items() if id(root) not in inner}
        if len(self.modules) == 1:
            self.modules = {"": next(iter(self.modules.values()))}
        self._module_names = {
            id(module): _joined(root_name, name)
            for root_name, root in self.modules.items()
            for name, module in root.named_modules()
        }
        self.kinds: dict[int, tuple[str, str]] = {}
        """By the id of a tensor: its kind (`parameter`, `buffer`, `gradient`, `input`) and its name."""
        self._keep_alive: dict[int, Tensor] = {}
        for known in self.optimizers:
            self.add_optimizer(known)
        for name, tensor in nearest_leaves(reached, deepest=4, most=_MOST_HELD):
            self._put(tensor, "parameter" if isinstance(tensor, nn.Parameter) else "input", name)
        for root_name, root in self.modules.items():
            for name, tensor in root.named_buffers():
                self._put(tensor, "buffer", _joined(root_name, name))
            for name, tensor in root.named_parameters():
                self._put(tensor, "parameter", _joined(root_name, name))

    def _put(self, tensor: Tensor, kind: str, name: str) -> None:
        self._keep_alive[id(tensor)] = tensor
        self.kinds[id(tensor)] = (kind, name)
        if tensor.is_leaf and tensor.grad is not None:
            self._put(tensor.grad, "gradient", name)

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Add the parameters of an optimizer; those that have a name keep it."""
        if optimizer not in self.optimizers:
            self.optimizers.append(optimizer)
        for i, group in enumerate(optimizer.param_groups):
            for j, parameter in enumerate(group["params"]):
                kind, name = self.kinds.get(id(parameter), ("", ""))
                if kind != "parameter":
                    self._put(parameter, "parameter", name or f"param_groups[{i}]['params'][{j}]")

    def module(self, module: nn.Module | None) -> str:
        """The path of a module; its class for one that is not part of the model."""
        if module is None:
            return ""
        name = self._module_names.get(id(module))
        name = type(module).__name__ if name is None else name or type(module).__name__
        return name.replace("_orig_mod.", "")

    def leaf(self, leaf: Tensor) -> str:
        """What a leaf tensor is called."""
        _, name = self.kinds.get(id(leaf), ("", ""))
        return f"`{name}`" if name else f"a tensor of shape {list(leaf.shape)}"

    def kept(self) -> Iterator[tuple[str, Tensor, bool]]:
        """What outlives the step, with its name, and whether an infinity in it is always a fault."""
        for tensor in list(self._keep_alive.values()):
            kind, name = self.kinds[id(tensor)]
            if kind in ("parameter", "buffer"):
                yield f"the {kind} `{name}`", tensor, kind == "parameter"
        for optimizer in self.optimizers:
            for parameter, state in optimizer.state.items():
                for key, value in state.items():
                    if isinstance(value, Tensor):
                        yield f"`{key}` of {self.leaf(parameter)} in the optimizer", value, True

    def record_of(self, index: int, base: Tensor, tensor: Tensor, counts: Counts) -> MemoryWrite:
        """A tensor that was not finite before the step, as the origin of what follows."""
        kind, name = self.kinds.get(id(base)) or self.kinds.get(id(tensor)) or self._by_storage(base) or ("", "")
        if not name:
            kind, name = "input", _local_name(base, tensor)
        record = MemoryWrite(index, f"{kind} {name}".strip(), "input", counts, base.numel())
        constant = kind != "parameter" and kind != "gradient" and counts.nan == 0
        record.meant = constant and _is_mask(base, counts)
        record.mask_like = constant and counts.inf == 0
        record.inputs = (describe(f"the {kind} `{name}`" if name else "a tensor", base),)
        record.notes = _rows(base)
        return record

    def _by_storage(self, tensor: Tensor) -> tuple[str, str] | None:
        try:
            pointer = tensor.untyped_storage()._cdata
            for other in self._keep_alive.values():
                if other.layout == torch.strided and other.untyped_storage()._cdata == pointer:
                    return self.kinds[id(other)]
        except (RuntimeError, NotImplementedError):
            pass
        return None


def _joined(root: str, name: str) -> str:
    return f"{root}.{name}" if root and name else root or name


def _reached(step_fn: Any) -> dict[str, object]:
    """The variables that a function can reach without being called, through other functions and objects of the user."""
    found: dict[str, object] = {}
    waiting: list[tuple[str, Any, int]] = [("", step_fn, 0)]
    seen: set[int] = set()
    while waiting and len(found) < _MOST_HELD:
        name, value, depth = waiting.pop(0)
        if name:
            found.setdefault(name, value)
        if id(value) not in seen and depth < _DEEPEST and not isinstance(value, _NO_HOLDERS):
            seen.add(id(value))
            waiting += [(inner, held, depth + 1) for inner, held in _held_by(name, value)]
    return found


def _held_by(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, functools.partial):
        yield from ((f"args[{i}]", part) for i, part in enumerate(value.args))
        yield from value.keywords.items()
        yield "", value.func
    elif isinstance(value, MethodType):
        yield "self", value.__self__
        yield "", value.__func__
    elif isinstance(value, FunctionType):
        if is_code_of_user(value.__code__.co_filename):
            yield from _seen_by(value)
    elif not isinstance(value, Tensor) and is_code_of_user(_file_of(type(value))):
        attributes = getattr(value, "__dict__", {})
        yield from ((f"{name}.{key}" if name else key, part) for key, part in attributes.items())
        yield "", getattr(type(value), "__call__", None)  # noqa: B004 (its code is wanted, not whether it is callable)


def _file_of(kind: type) -> str:
    module = sys.modules.get(kind.__module__)
    return getattr(module, "__file__", None) or ("<stdin>" if kind.__module__ == "__main__" else "<frozen>")


def _seen_by(function: FunctionType) -> Iterator[tuple[str, Any]]:
    code = function.__code__
    yield from ((name, function.__globals__[name]) for name in code.co_names if name in function.__globals__)
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield name, cell.cell_contents
        except ValueError:  # a variable that has no value yet
            continue
    defaults = function.__defaults__ or ()
    yield from zip(code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount], defaults, strict=True)


def _local_name(base: Tensor, tensor: Tensor) -> str:
    """The variable that holds a tensor, innermost frame of the user's first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_code_of_user(frame.f_code.co_filename):
            for name, value in nearest_leaves(dict(frame.f_locals), deepest=4, most=_MOST_HELD):
                if value is tensor or value is base:
                    return name
        frame = frame.f_back
    return ""


def _is_mask(tensor: Tensor, counts: Counts) -> bool:
    """One kind of infinity and at most one other value: this is not measured data."""
    if tensor.layout != torch.strided or (counts.inf and counts.negative_inf):
        return False
    finite = tensor[torch.isfinite(tensor)]
    return finite.numel() == 0 or bool((finite == finite[0]).all())


def _rows(tensor: Tensor) -> tuple[str, ...]:
    """Which rows of a table are bad."""
    if tensor.layout != torch.strided or tensor.dim() < 1:
        return ()
    bad = ~torch.isfinite(tensor)
    rows = (bad if tensor.dim() == 1 else bad.flatten(1).any(1)).nonzero().flatten()
    named = ", ".join(str(int(row)) for row in rows[:5])
    more = f" and {len(rows) - 5:,} more" if len(rows) > 5 else ""
    word = "position" if tensor.dim() == 1 else "row"
    return (f"in {word}{'' if len(rows) == 1 else 's'} {named}{more}",)
