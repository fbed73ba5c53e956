"""One operation before it runs: its arguments by name, and which of them it reads and writes.

The operation's schema says what is written. Batch normalisation is the exception: it writes its running statistics
although the schema does not say so.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from surefoot.core.nested import leaves, map_leaves
from surefoot.replay.locate.describe import Counts, count, nonfinite_number
from surefoot.replay.locate.memory_writes import MemoryWrite, same_storage

if TYPE_CHECKING:
    from surefoot.replay.locate.frames import Scene

_OVERWRITES = frozenset(
    (
        "copy_", "fill_", "zero_", "set_", "normal_", "uniform_", "bernoulli_", "random_", "exponential_", "geometric_",
        "log_normal_", "cauchy_", "resize_", "resize_as_",
    )
)  # fmt: skip
_LARGEST_COPY = 2**24
_ORDINARY = 0.5  # no operation has an edge there


class Argument(NamedTuple):
    """One tensor among the arguments."""

    name: str
    value: Tensor
    reads: bool
    """Whether its contents matter; false for `out=` and for what operations such as `fill_` overwrite."""

    writes: bool


class BadInput(NamedTuple):
    """An input with values that are not finite."""

    value: Tensor
    counts: Counts
    writers: list[MemoryWrite]


@dataclass
class Call:
    """One operation with everything that is known before it runs."""

    func: Any
    op: str
    """Its name, such as `aten.log.default`."""

    name: str
    """The same without name space and overload: `log`."""

    index: int
    scene: Scene
    node: Any
    """The autograd node being run; `None` outside backward."""

    arguments: list[Argument]
    settings: dict[str, object]
    """Arguments that are not tensors, by name."""

    args: Any
    kwargs: Mapping[str, Any]

    bad: list[BadInput] = field(default_factory=list)
    before: dict[str, Tensor] = field(default_factory=dict)
    """Copies of what it is about to overwrite, to describe its inputs later."""

    @property
    def has_nonfinite_number(self) -> bool:
        """Whether a plain number among the arguments is not finite."""
        return any(nonfinite_number(value) for value in leaves(self.settings, (float, complex)))

    @property
    def values(self) -> list[tuple[str, Tensor]]:
        """The inputs as they were before it ran."""
        return [(each.name, self.before.get(each.name, each.value)) for each in self.arguments if each.reads]

    def keep_what_it_overwrites(self) -> None:
        """Copy inputs that the operation overwrites."""
        self.before = {
            each.name: each.value.clone()
            for each in self.arguments
            if each.writes and each.reads and each.value.numel() <= _LARGEST_COPY
        }

    def find_own(self, results: list[Tensor]) -> list[Tensor | None] | None:
        """Where each result is bad although no bad input explains it; `None` if nowhere.

        The operation is run again with the bad values among its inputs replaced: what is still bad is its own.
        """
        if not self.bad:
            return [bad_positions(value) for value in results]
        random = torch.Tag.nondeterministic_seeded in getattr(self.func, "tags", ())
        gone = any(each.writes and each.reads and each.name not in self.before for each in self.arguments)
        if random or gone or not hasattr(self.func, "_schema"):
            return None
        try:
            again = self._run_without_bad_values()
        except RuntimeError:  # it does not accept other values: the question stays open
            return None
        if len(again) != len(results) or not any(count(value).total for value in again):
            return None
        return [bad_positions(value) for value in again]

    def fails_without_its_bad_values(self) -> bool:
        """Whether an operation that raised does so as well when the bad values among its inputs are replaced."""
        try:
            self._run_without_bad_values()
        except RuntimeError:
            return True
        return False

    def written(self, out: Any) -> list[Tensor]:
        """The tensors that it wrote: those written in place, then new ones, but no views of its inputs."""
        written = [each.value for each in self.arguments if each.writes]
        for value in leaves(out):
            if not any(same_storage(value, each.value) for each in self.arguments):
                written.append(value)
        return written

    def _run_without_bad_values(self) -> list[Tensor]:
        fresh: dict[int, Tensor] = {}
        for each in self.arguments:
            bad = any(each.value is other.value for other in self.bad)
            if bad or each.writes:
                fresh[id(each.value)] = mended(self.before.get(each.name, each.value))
        args, kwargs = map_leaves((self.args, self.kwargs), lambda leaf: fresh.get(id(leaf), leaf))
        again = make_call(self.func, self.index, self.scene, self.node, args, kwargs)
        return again.written(self.func(*args, **kwargs))


def mended(tensor: Tensor) -> Tensor:
    """A copy with an ordinary value in place of every bad one."""
    copy = tensor.detach().clone()
    mend(copy)
    return copy


def bad_positions(tensor: Tensor) -> Tensor | None:
    """Where a tensor is not finite; `None` for one that cannot be."""
    strided = tensor.layout == torch.strided and not tensor.is_nested
    return ~torch.isfinite(tensor) if strided and (tensor.is_floating_point() or tensor.is_complex()) else None


def mend(tensor: Tensor, where: Tensor | None = None) -> None:
    """Replace bad values by an ordinary one, in place: all of them, or those `where` says."""
    where = bad_positions(tensor) if where is None else where
    if where is not None:
        keeping: AbstractContextManager[Any] = (
            nullcontext() if tensor.is_inference() else _unsafe_preserve_version_counter(tensor)
        )
        with keeping:
            tensor.detach().masked_fill_(where, _ORDINARY)


def base_name(op: str) -> str:
    """`log` of `aten.log.default`."""
    parts = op.split(".")
    return parts[1] if len(parts) > 1 else op


def make_call(func: Any, index: int, scene: Scene, node: Any, args: Any, kwargs: Mapping[str, Any]) -> Call:
    """Classify the arguments of an operation."""
    op = str(func)
    call = Call(func, op, base_name(op), index, scene, node, [], {}, args, kwargs)
    schema = getattr(func, "_schema", None)
    declared = list(schema.arguments) if schema is not None else []
    positional: list[tuple[Any, int | str, Any]] = [
        (declared[i] if i < len(declared) else None, i, value) for i, value in enumerate(args)
    ]
    by_name = {argument.name: argument for argument in declared}
    keywords: list[tuple[Any, int | str, Any]] = [(by_name.get(key), key, value) for key, value in kwargs.items()]
    for argument, label, value in [*positional, *keywords]:
        _sort(call, argument, label, value)
    return call


def _sort(call: Call, argument: Any, label: int | str, value: Any) -> None:
    name = f"arg {label}" if isinstance(label, int) else label
    tensors = list(leaves(value))
    if not tensors:
        call.settings[argument.name if argument is not None else str(label)] = value
        return
    alias = getattr(argument, "alias_info", None)
    writes = alias is not None and alias.is_write
    writes = writes or (argument is not None and _is_running_statistic(call, argument.name))
    reads = not (writes and (getattr(argument, "is_out", False) or (call.name in _OVERWRITES and label == 0)))
    for position, tensor in enumerate(tensors):
        part = name if len(tensors) == 1 else f"{name}[{position}]"
        call.arguments.append(Argument(part, tensor, reads, writes))


def _is_running_statistic(call: Call, name: str) -> bool:
    return call.name.endswith("batch_norm") and name in ("running_mean", "running_var")
