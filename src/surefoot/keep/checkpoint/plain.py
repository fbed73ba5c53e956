"""Reads the JSON value that `keep/checkpoint/tree.py` makes from a state. Its input is untrusted.

There is a fixed table of kinds; nothing that the input names is imported or called, and every fault is raised as one
`CheckpointError`.
"""

from __future__ import annotations

import base64
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from surefoot.errors import CheckpointError

Marked: TypeAlias = dict[str, object]
"""A JSON object that represents a value of a kind that JSON lacks: its kind under `MARK`, and its contents."""
MARK = "$"
"""The key that marks an object as a value of a kind that JSON lacks."""

DEEPEST = 100
"""A state with more levels of nesting is a mistake (a list that contains itself) or an attack."""

NUMPY_DTYPE = re.compile(r"[<>|][biufcSUVmM]\d{1,9}(\[\w{1,8}\])?")
"""Numbers, text, bytes and dates of fixed size; no objects, no records."""


def unflatten(plain: Any, tensors: Mapping[str, Tensor], shards: Callable[[Marked], Any] | None = None) -> Any:
    """The state that was passed to `flatten`. Raises `CheckpointError` for any other input.

    `shards` returns the replacement of a tensor that is a shard of a larger one; without it, the shard itself is used.
    """
    try:
        return _Reader(tensors, shards).value(plain, 0)
    except CheckpointError:
        raise
    except Exception as error:  # untrusted input: any exception is a fault of the file
        raise CheckpointError(f"the state is not one that surefoot wrote: {type(error).__name__}: {error}") from error


class _Reader:
    """Reads one JSON value. Its methods may raise anything, which `unflatten` converts to one error."""

    def __init__(self, tensors: Mapping[str, Tensor], shards: Callable[[Marked], Any] | None) -> None:
        self._tensors, self._shards = tensors, shards
        self._made: dict[str, tuple[Any, Tensor]] = {}

    def value(self, plain: Any, depth: int) -> Any:
        if depth > DEEPEST:
            raise CheckpointError(f"the state is nested more than {DEEPEST} levels deep.")
        if plain is None or type(plain) in (bool, int, float, str):
            return plain
        if type(plain) is list:
            return self._items(plain, depth)
        if type(plain) is not dict:
            raise CheckpointError(f"the state holds a {type(plain).__name__}, which is not a JSON value.")
        if MARK not in plain:
            return {key: self.value(inner, depth + 1) for key, inner in plain.items()}
        kind = plain[MARK]
        if type(kind) is not str or kind not in _KINDS:
            raise CheckpointError(
                f"the state holds a value of the kind {kind!r:.80}, which this surefoot does not know."
            )
        return _KINDS[kind](self, plain, depth)

    def _items(self, plain: Any, depth: int) -> list[Any]:
        return [self.value(inner, depth + 1) for inner in _expect(plain, list)]

    def _pairs(self, plain: Marked, depth: int) -> list[tuple[Any, Any]]:
        pairs = [_expect(pair, list) for pair in _expect(plain["items"], list)]
        found = [(self.value(key, depth + 1), self.value(inner, depth + 1)) for key, inner in pairs]
        if any(isinstance(key, Tensor) for key, _ in found):
            raise CheckpointError("the state has a tensor as a key.")
        return found

    def ordered(self, plain: Marked, depth: int) -> OrderedDict[Any, Any]:
        found: Any = OrderedDict(self._pairs(plain, depth))
        if "metadata" in plain:
            found._metadata = self.value(plain["metadata"], depth + 1)
        return found  # type: ignore[no-any-return]

    def counter(self, plain: Marked, depth: int) -> Counter[Any]:
        return Counter(dict(self._pairs(plain, depth)))

    def tensor(self, plain: Marked, depth: int) -> Any:
        if self._shards is not None and "shard" in plain:
            return self._shards(plain)
        name, notes = _expect(plain["name"], str), (plain.get("as"), plain.get("shape"))
        if name in self._made and self._made[name][0] == notes:
            return self._made[name][1]
        tensor = as_noted(self._stored(name), *notes)
        self._made[name] = (notes, tensor)
        return tensor

    def array(self, plain: Marked, depth: int) -> np.ndarray:
        dtype, stored = _numpy_dtype(plain["dtype"]), self._stored(plain["name"]).numpy()
        if stored.dtype != dtype:
            stored = np.frombuffer(bytearray(_expect_bytes(stored)), dtype=dtype)
        return stored.reshape(_shape(plain["shape"]))

    def _stored(self, name: Any) -> Tensor:
        tensor = self._tensors.get(_expect(name, str))
        if tensor is None:
            raise CheckpointError(f"the state names a tensor {name!r:.80} that is not there.")
        return tensor


def as_noted(stored: Tensor, kind: Any, shape: Any) -> Tensor:
    """The original tensor, from the contents of the file and its description."""
    if kind == "complex":
        return torch.view_as_complex(stored)
    return stored if kind is None else stored.view(read_dtype(kind)).reshape(_shape(shape))


def tensors_by_path(plain: Any) -> Iterator[tuple[str, Marked]]:
    """Every tensor that a JSON value names, with its path there."""
    waiting: list[tuple[str, Any]] = [("", plain)]
    while waiting:
        path, value = waiting.pop()
        if type(value) is dict and value.get(MARK) == "tensor":
            yield path, value
        elif type(value) is dict and MARK in value:
            waiting += [(f"{path}/{place}", inner) for place, inner in _entries(value.get("items"))]
        elif type(value) is dict:
            waiting += [(f"{path}/{key}", inner) for key, inner in value.items()]
        elif type(value) is list:
            waiting += [(f"{path}/{place}", inner) for place, inner in enumerate(value)]


def _entries(items: Any) -> list[tuple[str, Any]]:
    """The entries of a marked value. Those of a dictionary are pairs, named by their keys if these are text."""
    if type(items) is not list:
        return []
    pairs = all(type(item) is list and len(item) == 2 for item in items)
    plain_keys = pairs and all(type(item[0]) in (str, int) for item in items)
    return [(str(item[0]), item[1]) for item in items] if plain_keys else [(str(i), x) for i, x in enumerate(items)]


def _expect(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise CheckpointError(f"the state holds a {type(value).__name__} where a {kind.__name__} belongs.")
    return value


def _expect_bytes(stored: np.ndarray) -> bytes:
    if stored.dtype != np.uint8 or stored.ndim != 1:
        raise CheckpointError(f"the state calls an array of {stored.dtype} a row of bytes.")
    return stored.tobytes()


def _shape(value: Any) -> list[int]:
    sizes: list[int] = [_expect(size, int) for size in _expect(value, list)]
    if any(size < 0 for size in sizes):  # -1 would mean "infer the size"
        raise CheckpointError(f"the state holds the shape {sizes}.")
    return sizes


def read_dtype(value: Any) -> torch.dtype:
    """The dtype of this name. Raises `CheckpointError`."""
    found = getattr(torch, _expect(value, str).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"the state names the dtype {value!r:.80}, which this torch does not have.")
    return found


def _numpy_dtype(value: Any) -> np.dtype[Any]:
    if not NUMPY_DTYPE.fullmatch(_expect(value, str)):
        raise CheckpointError(f"the state names the NumPy dtype {value!r:.80}, which is not plain numbers or text.")
    dtype: np.dtype[Any] = np.dtype(value)
    return dtype


def _scalar(plain: Marked) -> Any:
    return np.frombuffer(bytes.fromhex(_expect(plain["hex"], str)), dtype=_numpy_dtype(plain["dtype"])).reshape(())[()]


def _read_float(value: Any) -> float:
    if type(value) is str and value not in ("nan", "inf", "-inf"):
        raise CheckpointError(f"the state holds the number {value!r:.80}.")
    return float(value)


def _read_part(reader: _Reader, value: Any, depth: int) -> float:
    return float(_expect(reader.value(value, depth + 1), float))


_KINDS: dict[str, Callable[[_Reader, Marked, int], Any]] = {
    "tuple": lambda reader, plain, depth: tuple(reader._items(plain["items"], depth)),
    "set": lambda reader, plain, depth: set(reader._items(plain["items"], depth)),
    "frozenset": lambda reader, plain, depth: frozenset(reader._items(plain["items"], depth)),
    "dict": lambda reader, plain, depth: dict(reader._pairs(plain, depth)),
    "ordered": _Reader.ordered,
    "counter": _Reader.counter,
    "tensor": _Reader.tensor,
    "numpy": _Reader.array,
    "numpy.scalar": lambda reader, plain, depth: _scalar(plain),
    "float": lambda reader, plain, depth: _read_float(_expect(plain["value"], str)),
    "int": lambda reader, plain, depth: int(_expect(plain["hex"], str), 16),
    "str": lambda reader, plain, depth: bytes.fromhex(_expect(plain["hex"], str)).decode("utf-8", "surrogatepass"),
    "bytes": lambda reader, plain, depth: base64.b64decode(_expect(plain["base64"], str), validate=True),
    "complex": lambda reader, plain, depth: complex(
        _read_part(reader, plain["real"], depth), _read_part(reader, plain["imag"], depth)
    ),
    "torch.dtype": lambda reader, plain, depth: read_dtype(plain["value"]),
    "torch.device": lambda reader, plain, depth: torch.device(_expect(plain["value"], str)),
    "torch.Size": lambda reader, plain, depth: torch.Size(_shape(plain["value"])),
}
