"""The random streams of the process: Python's, NumPy's, torch's on the CPU and on every device.

`read_streams` returns their states as tensors and plain values, so they can be saved without pickle; `set_streams` sets
them. Generators of the program (`torch.Generator`, `numpy.random.Generator`) are not included; `loader_generators`
finds those of a data loader.
"""

from __future__ import annotations

import random
from typing import Any, TypedDict

import numpy as np
import torch
from torch import Tensor

from surefoot.core.device import DeviceStreams, random_states, set_random_states

_MT19937_WORDS = 624


class PythonStream(TypedDict):
    """The state of Python's `random`."""

    version: int
    words: Tensor
    gauss: float | None


class NumpyStream(TypedDict):
    """The state of NumPy's global generator."""

    kind: str
    keys: Tensor
    position: int
    has_gauss: int
    cached: float


class RandomStreams(DeviceStreams):
    """The stored states of all random streams of the process."""

    python: PythonStream
    numpy: NumpyStream
    torch: Tensor


def read_streams() -> RandomStreams:
    """The state of every random stream that the process uses."""
    version, words, gauss = random.getstate()
    legacy: Any = np.random.get_state()
    kind, keys, position, has_gauss, cached = legacy
    return {
        "python": {"version": version, "words": torch.from_numpy(np.array(words, dtype=np.int64)), "gauss": gauss},
        "numpy": {
            "kind": str(kind),
            "keys": torch.from_numpy(keys.astype(np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "torch": torch.get_rng_state(),
        **random_states(),
    }


def set_streams(state: RandomStreams) -> None:
    """Set every stream to a state that was read. Raises `ValueError` for an invalid state, before any change.

    Devices that are missing now, or were missing when the state was read, are ignored.
    """
    python, legacy = state["python"], state["numpy"]
    # NumPy accepts any position and would read beyond its words.
    if legacy["kind"] != "MT19937" or len(legacy["keys"]) != _MT19937_WORDS:
        raise ValueError("the state of NumPy's random stream is not one of MT19937.")
    if not 0 <= legacy["position"] <= _MT19937_WORDS or len(python["words"]) != _MT19937_WORDS + 1:
        raise ValueError("the state of a random stream points outside itself.")
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    keys = legacy["keys"].numpy().astype(np.uint32)
    np.random.set_state((legacy["kind"], keys, legacy["position"], legacy["has_gauss"], legacy["cached"]))
    torch.set_rng_state(state["torch"].cpu())
    set_random_states(state)


def loader_generators(loader: Any) -> list[torch.Generator]:
    """The generators that a loader shuffles with; they are random streams too."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    sources = (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    found = [getattr(source, "generator", None) for source in sources]
    return [generator for generator in dict.fromkeys(found) if isinstance(generator, torch.Generator)]
