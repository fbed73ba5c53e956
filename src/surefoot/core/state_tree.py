"""Converts the state of any part into tensors and plain values, and back.

States consist of named tuples, tuples, arrays and numbers. `pack` returns nested dictionaries and lists that contain
only tensors, numbers, strings and `None`, so they can be saved without pickle. `unpack` uses a fresh state of the same
part, which defines the types.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, TypeAlias, TypedDict

import numpy as np
import torch
from torch import Tensor

from surefoot.core import nested
from surefoot.types import LayerStats, OptimizerSetting, Signals, StepRecord

Packed: TypeAlias = "Tensor | float | str | list[Packed] | dict[str, Packed] | None"
"""The stored form of a state: the result of `pack`."""


class PackedRecord(TypedDict):
    """The stored form of a `StepRecord`."""

    signals: dict[str, Packed]
    """The fields of `Signals` by name; `layers` contains those of `LayerStats`."""
    skipped: bool
    reasons: list[str]
    overflow: bool
    notices: list[str]
    settings: list[list[Any]]
    """Parameter group, key and value of each; older versions did not save them."""


_ADDRESS = re.compile(" at 0x[0-9a-fA-F]+")
"""The part of a default `repr` that differs between processes."""


def settings_of(part: Any) -> str:
    """The settings of a part, which decide whether a saved state still fits."""
    return _ADDRESS.sub("", repr(part))


def pack(state: Any, live: bool = False) -> Any:
    """Nested dictionaries and lists of tensors and plain values; with `live`, tensors are not copied."""
    if isinstance(state, Tensor):
        return state.detach() if live else state.detach().cpu().clone()
    if isinstance(state, (np.ndarray, np.generic)):
        return torch.from_numpy(np.array(state))
    if hasattr(state, "_asdict"):
        return {key: pack(value, live) for key, value in state._asdict().items()}
    if isinstance(state, (tuple, list)):
        return [pack(value, live) for value in state]
    if isinstance(state, dict):
        return {key: pack(value, live) for key, value in state.items()}
    return state


def unpack(template: Any, packed: Any) -> Any:
    """The state that was passed to `pack`; `template` is a fresh one of the same part."""
    if isinstance(template, Tensor):
        return torch.as_tensor(packed, device=template.device)
    if isinstance(template, (np.ndarray, np.generic)):
        return packed.cpu().numpy() if isinstance(packed, Tensor) else np.asarray(packed)
    if hasattr(template, "_asdict"):
        return type(template)(**{key: unpack(value, packed[key]) for key, value in template._asdict().items()})
    if isinstance(packed, list):
        kind = list if isinstance(template, list) else tuple
        if template and len(template) == len(packed):
            return kind(unpack(inner, value) for inner, value in zip(template, packed, strict=True))
        return kind(packed)
    if isinstance(template, dict):
        return {key: unpack(template.get(key), value) for key, value in packed.items()}
    return packed


def on_device(state: Any, device: torch.device) -> Any:
    """The same state with its arrays as float32 tensors on a device."""
    arrays = (np.ndarray, np.generic, Tensor)
    return nested.map_leaves(state, lambda array: torch.as_tensor(array, dtype=torch.float32, device=device), arrays)


def leaves(state: Any) -> list[Tensor]:
    """The tensors of a state, in order."""
    return list(nested.leaves(state))


def with_leaves(state: Any, tensors: Iterator[Tensor]) -> Any:
    """The same state with its tensors replaced, in order."""
    return nested.map_leaves(state, lambda _: next(tensors))


def grown(state: Any, fresh: Any) -> Any:
    """`state` in the shape of `fresh`, which has room for more entries after the old ones, or for fewer."""
    if isinstance(fresh, Tensor):
        if fresh.shape == state.shape:
            return state
        return torch.cat([state.to(fresh)[: len(fresh)], fresh[len(state) :]])
    return type(fresh)(*(grown(a, b) for a, b in zip(state, fresh, strict=True))) if fresh else fresh


def choose(keep_old: Any, old: Any, new: Any) -> Any:
    """`old` if `keep_old` is true, else `new`: selected, never blended, without reading the flag from a device."""
    if not isinstance(keep_old, Tensor):
        return old if keep_old else new
    if isinstance(new, Tensor):
        return torch.where(keep_old, torch.as_tensor(old, dtype=new.dtype, device=new.device), new)
    if hasattr(new, "_asdict"):
        return type(new)(*(choose(keep_old, a, b) for a, b in zip(old, new, strict=True)))
    if isinstance(new, tuple):
        return tuple(choose(keep_old, a, b) for a, b in zip(old, new, strict=True))
    return new


def pack_record(record: StepRecord) -> PackedRecord:
    """A step's record as nested dictionaries of tensors and plain values."""
    signals = {each.name: getattr(record.signals, each.name) for each in fields(Signals)}
    layers = record.signals.layers
    signals["extra"] = dict(record.signals.extra)
    signals["layers"] = (
        None if layers is None else {each.name: pack(getattr(layers, each.name)) for each in fields(LayerStats)}
    )
    return {
        "signals": signals,
        "skipped": record.skipped,
        "reasons": list(record.reasons),
        "overflow": record.overflow,
        "notices": list(record.notices),
        "settings": [list(setting) for setting in record.settings],
    }


def unpack_record(packed: PackedRecord) -> StepRecord:
    """The record that was passed to `pack_record`."""
    signals: Any = dict(packed["signals"])
    if signals["layers"] is not None:
        layers = dict(signals["layers"])
        signals["layers"] = LayerStats(**layers | {"names": tuple(layers["names"]), "ranks": tuple(layers["ranks"])})
    return StepRecord(
        Signals(**signals),
        packed["skipped"],
        tuple(packed["reasons"]),
        packed["overflow"],
        tuple(packed["notices"]),
        tuple(OptimizerSetting(*setting) for setting in packed.get("settings", ())),
    )
