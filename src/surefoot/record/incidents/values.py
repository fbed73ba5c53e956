"""Converts a batch to plain data and back: tensors with their memory layout, plain values, and their containers.

`encode` converts any nested value to a tree of small dictionaries that `keep/checkpoint` can write without pickle. A
container class of a library (a `BatchEncoding`, a dataclass, a graph batch) is replaced by its entries or attributes;
anything that is neither a tensor nor a plain value is described and left out. `decode` restores the nested value, with
dictionaries, tuples and lists. Given a batch of the same kind as a pattern, it puts the values into a copy of that, so
that code that expects the library's class gets it: no class is ever looked up by a name in a file.

Equal bits need more than equal values: kernels may differ for another memory layout. So strides, and the position of
the first value within 64 bytes, are restored too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple, TypedDict

import numpy as np
import torch
from torch import Tensor

from surefoot.core.nested import attributes_of, kind_of, leaves, with_attributes, with_entries
from surefoot.keep.checkpoint.tree import odd_kind
from surefoot.observe.readable import is_readable

ALIGNMENT = 64
_PLAIN = (type(None), bool, int, float, complex, bytes, torch.dtype, torch.device, torch.Size)
MOST_VALUES = 50_000
"""The maximum number of values visited in a batch. Objects that it refers to (a dataset, a document) may have more."""
COPIED_BYTES = 1 << 20
"""NumPy arrays up to this size are copied."""
_DEEPEST = 20
_IS: Final = "is"
Encoded = TypedDict(
    "Encoded",
    {
        "is": str,  # `tensor`, `plain`, `left out`, `list`, `tuple`, `mapping`, `fields` or `object`
        "type": str,  # the class of an object, or of what was left out
        "value": Any,  # the tensor or the plain value
        "items": list[Any],  # the parts of a list or a tuple; name and part of each attribute or entry otherwise
        "device": str,  # of a tensor
        "strides": list[int],  # of a tensor that is not contiguous
        "beyond": int,  # how many bytes its first value lies beyond a multiple of `ALIGNMENT`
        "requires_grad": bool,
    },
    total=False,
)
"""A value in a form that can be stored."""


def tensors_in(value: Any) -> list[Tensor]:
    """Every tensor in nested containers, mappings and objects that hold data."""
    return list(leaves(value, objects=True, deepest=_DEEPEST, most=MOST_VALUES))


# ---- without references ---------------------------------------------------------------------------------------------

_is_inference, _detach = Tensor.is_inference, Tensor.detach  # the script may replace them
_numel, _element_size = Tensor.numel, Tensor.element_size


class TensorMirror:
    """A nested value as it is now, in surefoot's own containers: it keeps its numbers, but none of its objects, alive.

    For each tensor an alias is kept, which shares its memory and its count of writes. A NumPy array cannot be aliased
    without a reference: a small one is copied, a large one is available only while the script holds it.
    """

    __slots__ = ("_left", "device_bytes", "nbytes", "tensors", "value")

    def __init__(self, value: Any) -> None:
        self.tensors: list[Tensor] = []
        """The aliases, in the order of `tensors_in`; tensor subclasses are left out."""
        self.nbytes = 0
        """The size of its tensors in memory."""
        self.device_bytes = 0
        """The part of it that is on a device."""
        self._left = MOST_VALUES  # the number of values that may still be visited
        self.value = self._value(value, [])

    def versions(self) -> list[int]:
        """The number of writes to each tensor so far."""
        return [-1 if _is_inference(tensor) else tensor._version for tensor in self.tensors]

    def _value(self, value: Any, around: list[int]) -> Any:
        kind = type(value)
        if kind in _PLAIN or kind is str:
            return value
        if kind is tuple or kind is dict:  # as the arguments of every call
            if not value:
                return kind()
        elif isinstance(value, Tensor):
            return self._tensor(value)
        elif isinstance(value, np.generic):
            return value
        elif isinstance(value, str):
            return "".join((value,))
        elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
            return value.copy() if value.nbytes <= COPIED_BYTES else _Part("weak", _kind(value), weakref.ref(value))
        found = None
        if len(around) < _DEEPEST and id(value) not in around:
            around.append(id(value))
            found = self._container(value, around)
            around.pop()
        return _Part("left out", _kind(value), None) if found is None else found

    def _tensor(self, value: Tensor) -> Any:
        if type(value).__torch_dispatch__ is not Tensor.__torch_dispatch__:
            return _Part("weak", _kind(value), weakref.ref(value))
        alias = _detach(value)
        self.tensors.append(alias)
        size = _numel(alias) * _element_size(alias)
        self.nbytes += size
        self.device_bytes += 0 if alias.device.type == "cpu" else size
        if not value.requires_grad:
            return alias
        return _Part("requires grad", _kind(value), alias)

    def _container(self, value: Any, around: list[int]) -> Any:
        if type(value) is tuple:
            return tuple(self._each(value, around))
        if type(value) is dict:
            return dict(zip(value, self._each(value.values(), around), strict=False))
        match kind_of(value, objects=True):
            case "mapping":
                entries = dict(zip(value, self._each(value.values(), around), strict=False))
                return _Part("mapping", _kind(value), entries)
            case "fields":
                fields = dict(zip(value._fields, self._each(value, around), strict=False))
                return _Part("fields", _kind(value), fields)
            case "sequence":
                found = self._each(value, around)
                return tuple(found) if isinstance(value, tuple) else found
            case "object":
                own = attributes_of(value)
                entries = dict(zip(own, self._each(own.values(), around), strict=False))
                return _Part("object", _kind(value), entries)
        return None

    def _each(self, items: Iterable[Any], around: list[int]) -> list[Any]:
        found: list[Any] = []
        for item in items:
            self._left -= 1
            if self._left < 0:
                found.append(_TOO_MANY)
                break
            found.append(self._value(item, around))
        return found


class _Part(NamedTuple):
    """Replaces in a mirror anything that is not a tensor, a plain value or a container of Python."""

    what: str
    kind: str
    content: Any


_TOO_MANY = _Part("too many", "value", None)


# ---- encoding -----------------------------------------------------------------------------------------------------


def encode(value: Any, redact: Callable[[str], str], left_out: list[str], path: str = "batch") -> Encoded:
    """A value, or the mirror of one, as plain data; descriptions of what is left out are appended to `left_out`."""
    mirror = value if isinstance(value, TensorMirror) else TensorMirror(value)
    return _Encoder(redact, left_out).value(mirror.value, path)


class _Encoder:
    """Encodes one mirror; what the mirror left out is described."""

    def __init__(self, redact: Callable[[str], str], left_out: list[str]) -> None:
        self._redact, self._left_out = redact, left_out
        self._full = False

    def value(self, value: Any, path: str) -> Encoded:
        if isinstance(value, _Part):
            return self._part(value, path)
        if isinstance(value, Tensor):
            return _encode_tensor(value, self._left_out, path)
        if isinstance(value, str):
            return _encode_text(value, self._redact, self._left_out, path)
        if type(value) in (list, tuple):
            parts = [self.value(item, f"{path}[{i}]") for i, item in enumerate(value)]
            return {_IS: type(value).__name__, "items": parts}
        return self._mapping(value, path) if type(value) is dict else {_IS: "plain", "value": value}

    def _part(self, part: _Part, path: str) -> Encoded:
        if part is _TOO_MANY:
            if not self._full:
                self._full = True
                self._left_out.append(f"{path} and what comes after it: there are more than {MOST_VALUES:,} values")
            return {_IS: "left out", "type": part.kind}
        content = part.content() if part.what == "weak" else part.content
        if part.what in ("weak", "left out") and content is None:
            why = "which is neither a tensor nor a plain value" if part.what == "left out" else "which is gone"
            self._left_out.append(f"{path}: a {part.kind}, {why}")
            return {_IS: "left out", "type": part.kind}
        if part.what == "weak":
            return self.value(content, path)
        if part.what == "requires grad":
            found = _encode_tensor(content, self._left_out, path)
            return found | {"requires_grad": True} if found[_IS] == "tensor" else found
        if part.what == "mapping":
            return self._mapping(content, path) | {"type": part.kind}
        items = [[name, self.value(item, f"{path}.{name}")] for name, item in content.items()]
        return {_IS: part.what, "type": part.kind, "items": items}

    def _mapping(self, value: Mapping[Any, Any], path: str) -> Encoded:
        keys = [key for key in value if isinstance(key, (str, int, float, bool))]
        if len(keys) < len(value):
            self._left_out.append(f"{path}: {len(value) - len(keys)} entries whose keys are neither text nor numbers")
        items = [[key, self.value(value[key], f"{path}[{key!r}]")] for key in keys]
        return {_IS: "mapping", "type": _kind(value), "items": items}


def _encode_tensor(value: Tensor, left_out: list[str], path: str) -> Encoded:
    if odd := odd_kind(value):
        left_out.append(f"{path}: a tensor of the kind {odd}")
        return {_IS: "left out", "type": f"{odd} tensor"}
    if not is_readable(value):
        left_out.append(f"{path}: a tensor whose memory was freed")
        return {_IS: "left out", "type": _kind(value)}
    found: Encoded = {_IS: "tensor", "value": value.detach(), "device": str(value.device)}
    if not value.is_contiguous():
        found["strides"] = list(value.stride())
    if value.device.type == "cpu" and value.numel() and (beyond := value.data_ptr() % ALIGNMENT):
        found["beyond"] = beyond
    if value.requires_grad:
        found["requires_grad"] = True
    return found


def _encode_text(value: str, redact: Callable[[str], str], left_out: list[str], path: str) -> Encoded:
    shown = redact(value)
    if shown != value:
        left_out.append(f"{path}: a piece of its text, which was redacted")
    return {_IS: "plain", "value": shown}


def _kind(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


# ---- decoding -----------------------------------------------------------------------------------------------------


class LeftOut:
    """Replaces a value that could not be stored."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __repr__(self) -> str:
        return f"<a {self.kind}, left out of the incident>"


class EncodedBatch(dict[str, object]):
    """The attributes of an object whose class is not available: both `record.x` and `record["x"]` work."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def decode(plain: Encoded, pattern: Any = None, device: torch.device | None = None) -> Any:
    """The original value. With a pattern of the same structure, in containers of the pattern's classes.

    Tensors go to `device`, or to the devices in the pattern.
    """
    kind = plain[_IS]
    if kind == "tensor":
        return _decode_tensor(plain, pattern, device)
    if kind == "plain":
        return plain["value"]
    if kind == "left out":
        return LeftOut(str(plain["type"])) if pattern is None else pattern
    if kind in ("list", "tuple"):
        like = pattern if isinstance(pattern, (list, tuple)) and len(pattern) == len(plain["items"]) else None
        parts = [decode(item, None if like is None else like[i], device) for i, item in enumerate(plain["items"])]
        return tuple(parts) if kind == "tuple" else parts
    return _decode_named(plain, pattern, device)


def _decode_named(plain: Encoded, pattern: Any, device: torch.device | None) -> Any:
    kind, items = plain["is"], plain["items"]
    if kind == "mapping":
        fits = isinstance(pattern, Mapping) and all(key in pattern for key, _ in items)
        values = {key: decode(item, pattern[key] if fits else None, device) for key, item in items}
        return with_entries(pattern, values) if fits and type(pattern) is not dict else values
    fits = pattern is not None and all(hasattr(pattern, name) for name, _ in items)
    values = {name: decode(item, getattr(pattern, name) if fits else None, device) for name, item in items}
    if not fits:
        return EncodedBatch(values)
    if kind == "fields":
        return type(pattern)(**values)
    return with_attributes(pattern, values)


@torch.no_grad()
def _decode_tensor(plain: Encoded, pattern: Any, device: torch.device | None) -> Tensor:
    value: Tensor = plain["value"]
    place = pattern.device if device is None and isinstance(pattern, Tensor) else device or value.device
    strides = [int(stride) for stride in plain.get("strides", ())]
    beyond = int(plain.get("beyond", 0))
    if place.type != "cpu":
        beyond = 0
    if strides and (len(strides) != value.dim() or min(strides, default=0) < 0):
        strides = []
    if strides or beyond % value.element_size() == 0 < beyond < ALIGNMENT:
        value = _laid_out(value, strides or list(value.stride()), beyond, place)
    else:
        value = value.to(place, copy=True)
    return value.requires_grad_() if plain.get("requires_grad") else value


def _laid_out(value: Tensor, strides: list[int], beyond: int, place: torch.device) -> Tensor:
    """A copy with given strides whose first value is `beyond` a multiple of 64 bytes."""
    size = value.element_size()
    span = 1 + sum((length - 1) * stride for length, stride in zip(value.shape, strides, strict=True))
    if value.numel() == 0 or span > 8 * value.numel() + 64:  # a view of something much larger
        return value.to(place, copy=True)
    spare = ALIGNMENT // size + 1
    room = torch.zeros(span + 2 * spare, dtype=value.dtype, device=place)
    # Views of views may start anywhere; an allocation starts at a multiple of the size.
    skip = next((i for i in range(2 * spare) if (room.data_ptr() + i * size) % ALIGNMENT == beyond), 0)
    laid = room.as_strided(value.shape, strides, skip)
    if any(stride == 0 and length > 1 for stride, length in zip(strides, value.shape, strict=True)):
        once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in strides)
        laid[once].copy_(value[once])
        return laid
    return laid.copy_(value)
