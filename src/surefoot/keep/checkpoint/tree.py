"""Converts a nested state to one JSON value and named tensors, and back, without pickle.

`flatten` walks dictionaries, lists and tuples. Tensors are taken out and named by their path ("models.0.weight").
Values that JSON has (text, numbers, lists, dictionaries with text as keys) are unchanged, so that the file is readable.
Everything else becomes a small object with the key `$`, which contains its kind:

    {"betas": (0.9, 0.999), "step": tensor(3)}
    {"betas": {"$": "tuple", "items": [0.9, 0.999]}, "step": {"$": "tensor", "name": "step"}}

A dictionary that has a key `$` itself is written as a list of pairs, so there is no ambiguity. `unflatten` (`plain.py`)
supports a fixed list of kinds, calls nothing that the file names, and raises `CheckpointError` for any fault in its
input: an untrusted file can be refused, never executed.

Preserved exactly: the types listed in the tables below, tensors of every strided dtype, the sign of zero, NaN, the
order of dictionaries, and the identity of tied tensors. Not preserved: memory layout, `requires_grad`, the default
factory of a `defaultdict`, and views that overlap without being equal. For a DTensor, the shard of this process is
stored, with its position in the whole (`shards.py`). Anything else (functions, objects, sparse and quantized tensors)
is refused, with its path: a state that is restored slightly differently would be worse.
"""

from __future__ import annotations

import base64
import re
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from math import isfinite
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surefoot.errors import UsageError
from surefoot.keep.checkpoint.plain import DEEPEST, MARK, NUMPY_DTYPE, Marked
from surefoot.keep.checkpoint.shards import Spread, is_spread, spread_of

LONGEST_NAME = 300
STORED_AS_IS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The dtypes that every version of safetensors supports. Complex tensors are stored as pairs, the rest as bytes."""

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")  # JSON does not preserve such text
_LONGEST_INTEGER = 10**4000  # Python refuses to print or read more than 4,300 digits


Path = tuple[str, ...]


def flatten(tree: Any) -> tuple[Any, dict[str, Tensor]]:
    """The state as a JSON value that names its tensors, and the tensors. No tensor is copied."""
    flattened = Flattened(tree)
    flattened.name_tensors()
    return flattened.plain, flattened.tensors


_PLAIN = (Tensor, torch.nn.Parameter)


def same_view(tensor: Tensor) -> tuple[Any, ...] | None:
    """A key that is equal for two tensors with the same view of the same memory; `None` if it cannot be determined."""
    if tensor.layout is not torch.strided or tensor.is_meta:
        return None
    where = tensor.data_ptr()
    if where == 0 or tensor.numel() == 0:
        return None
    return (where, tensor.dtype, tensor.shape, tensor.stride(), tensor.device, tensor.is_conj(), tensor.is_neg())


def local_part(tensor: Tensor) -> Tensor:
    """The tensor itself, without its graph; for a DTensor, the shard that this process holds."""
    if type(tensor) not in _PLAIN:
        to_local = getattr(tensor, "to_local", None)
        tensor = tensor if to_local is None else to_local()
        finish = getattr(tensor, "wait", None)  # a shard may still be in transfer
        tensor = tensor if finish is None else finish()
    return tensor.detach() if tensor.requires_grad or type(tensor) is not Tensor else tensor


def _marked(kind: str, **content: Any) -> Marked:
    return {MARK: kind, **content}


def _float(value: float) -> Any:
    return value if isfinite(value) else _marked("float", value=repr(value))


def _integer(value: int) -> Any:
    return value if abs(value) < _LONGEST_INTEGER else _marked("int", hex=hex(value))


def _text(value: str) -> Any:
    if value.isascii() or not _LONE_SURROGATE.search(value):
        return value
    return _marked("str", hex=value.encode("utf-8", "surrogatepass").hex())


_SCALARS: dict[type, Callable[[Any], Any]] = {
    type(None): lambda value: value,
    bool: lambda value: value,
    int: _integer,
    float: _float,
    str: _text,
    bytes: lambda value: _marked("bytes", base64=base64.b64encode(value).decode()),
    complex: lambda value: _marked("complex", real=_float(value.real), imag=_float(value.imag)),
    torch.dtype: lambda value: _marked("torch.dtype", value=str(value)),
    torch.device: lambda value: _marked("torch.device", value=str(value)),
    torch.Size: lambda value: _marked("torch.Size", value=list(value)),
}
_SEQUENCES: dict[type, str] = {tuple: "tuple", set: "set", frozenset: "frozenset"}
_DICTIONARIES: dict[type, str] = {dict: "dict", defaultdict: "dict", OrderedDict: "ordered", Counter: "counter"}


class Flattened:
    """A state without its tensors: `plain` is made immediately, their names on demand.

    Training waits only for the first part, which includes everything that can still change or be refused. Naming many
    tensors and finding tied ones takes longer, and is done by the writing thread.
    """

    def __init__(self, tree: Any, spread: Mapping[int, Spread] | None = None) -> None:
        """Take the tensors out of `tree`. `spread` contains those that are copies of shards, by their `id`."""
        self._spread = spread or {}
        self.tensors: dict[str, Tensor] = {}
        """The stored tensors by name."""
        self.owners: dict[str, set[Path]] = {}
        """For every name, the paths that refer to it."""
        self._found: list[tuple[Tensor, Path, Marked]] = []
        self._used: dict[str, int] = {"__metadata__": 0}  # reserved by the file format
        self.plain = self._plain(tree, ())
        """The JSON value. It contains the names of its tensors after `name_tensors`."""

    def name_tensors(self) -> None:
        """Give every tensor its name; tied tensors share one."""
        seen: dict[tuple[Any, ...], Marked] = {}
        for tensor, path, marked in self._found:
            view = same_view(tensor)
            first = seen.get(view) if view is not None else None
            if first is None:
                stored, notes = _storable(tensor)
                marked.update(name=self._keep(stored, path), **notes)
                if view is not None:
                    seen[view] = marked
            else:
                marked.update(first)
            self.owners[str(marked["name"])].add(path)
        self._found.clear()

    def _plain(self, value: Any, path: Path) -> Any:
        """The JSON value for one value of the state."""
        kind = type(value)
        if len(path) > DEEPEST:
            raise UsageError(
                f"{_spell(path[:4])}… is nested more than {DEEPEST} levels deep. Check whether it contains itself."
            )
        if kind in _SCALARS:
            return _SCALARS[kind](value)
        if kind is list:
            return self._items(value, path)
        if kind in _SEQUENCES:
            return _marked(_SEQUENCES[kind], items=self._items(value, path))
        if kind in _DICTIONARIES:
            return self._dictionary(value, path)
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if isinstance(value, (np.ndarray, np.generic)):
            return self._numpy(value, path)
        raise UsageError(
            f"{_spell(path)} is a {kind.__module__}.{kind.__qualname__}; a checkpoint holds tensors, arrays, numbers, "
            "text, and lists, tuples, sets and dictionaries of them. Leave it out, or save its parts."
        )

    def _items(self, values: Iterable[Any], path: Path) -> list[Any]:
        return [self._plain(value, (*path, str(index))) for index, value in enumerate(values)]

    def _dictionary(self, value: dict[Any, Any], path: Path) -> Any:
        kind = _DICTIONARIES[type(value)]
        if kind == "dict" and MARK not in value and all(type(key) is str and _text(key) is key for key in value):
            return {key: self._plain(inner, (*path, key)) for key, inner in value.items()}
        marked = _marked(kind, items=[self._pair(key, inner, path) for key, inner in value.items()])
        # torch stores the version of every module's state with the dictionary, and modules depend on it.
        if kind == "ordered" and (metadata := getattr(value, "_metadata", None)) is not None:
            marked["metadata"] = self._plain(metadata, (*path, "_metadata"))
        return marked

    def _pair(self, key: Any, value: Any, path: Path) -> list[Any]:
        if isinstance(key, (Tensor, np.ndarray)):
            raise UsageError(
                f"{_spell(path)} has tensors as keys, which cannot be saved by name. Save "
                "`optimizer.state_dict()` and `model.state_dict()`, not the objects' own dictionaries."
            )
        inside = (*path, str(key))
        return [self._plain(key, inside), self._plain(value, inside)]

    def _tensor(self, value: Tensor, path: Path) -> Marked:
        tensor = local_part(value)
        if odd := odd_kind(tensor):
            raise UsageError(
                f"{_spell(path)} is a tensor of the kind {odd}; save the dense tensors that it consists of."
            )
        marked = _marked("tensor")
        spread = spread_of(value) if is_spread(value) else self._spread.get(id(value))
        if spread is not None:
            marked["shard"] = {**spread.layout().stored(), "dtype": str(tensor.dtype)}
        self._found.append((tensor, path, marked))
        return marked

    def _numpy(self, value: np.ndarray | np.generic, path: Path) -> Marked:
        dtype = value.dtype
        if dtype.hasobject or not NUMPY_DTYPE.fullmatch(dtype.str) or np.dtype(dtype.str) != dtype:
            raise UsageError(f"{_spell(path)} is a NumPy array of {dtype}, which is not plain numbers or text.")
        if isinstance(value, np.generic):
            return _marked("numpy.scalar", dtype=dtype.str, hex=np.asarray(value).tobytes().hex())
        copied = np.array(value, order="C")  # the caller may change its array before this one is on disk
        try:
            stored = torch.from_numpy(copied)
        except (TypeError, ValueError):  # dates, text, or the other byte order
            stored = torch.frombuffer(bytearray(copied.tobytes()) or bytearray(1), dtype=torch.uint8)[: copied.nbytes]
        marked = _marked("numpy", dtype=dtype.str, shape=list(copied.shape))
        self._found.append((stored, path, marked))
        return marked

    def _keep(self, tensor: Tensor, path: Path) -> str:
        wanted = ".".join(path)[:LONGEST_NAME] or "value"
        if not wanted.isascii():
            wanted = wanted.encode("utf-8", "backslashreplace").decode()
        name = wanted
        while name in self._used:
            self._used[wanted] += 1
            name = f"{wanted}~{self._used[wanted]}"
        self._used[name] = 1
        self.tensors[name], self.owners[name] = tensor, set()
        return name


def _spell(path: Path) -> str:
    return ".".join(path) or "the state"


def odd_kind(tensor: Tensor) -> str | None:
    """The kind of a tensor whose memory is not simply its values; `None` for all others."""
    if tensor.layout is not torch.strided:
        return str(tensor.layout).removeprefix("torch.")
    if type(tensor) not in _PLAIN:
        from torch.utils._python_dispatch import is_traceable_wrapper_subclass

        if is_traceable_wrapper_subclass(tensor):
            return type(tensor).__name__
    if tensor.is_quantized:
        return "quantized"
    return "nested" if tensor.is_nested else "meta" if tensor.is_meta else None


def _storable(tensor: Tensor) -> tuple[Tensor, Marked]:
    """The tensor in a dtype that the file format supports, and the description needed to restore it."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if tensor.dtype in STORED_AS_IS:
        return tensor, {}
    if tensor.is_complex():
        return torch.view_as_real(tensor), {"as": "complex"}
    return tensor.reshape(-1).view(torch.uint8), {"as": str(tensor.dtype), "shape": list(tensor.shape)}
