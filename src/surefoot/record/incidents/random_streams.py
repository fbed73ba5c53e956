"""Reads the random streams at every step, in a microsecond or two.

`core.random_state.read_streams` takes some 80 microseconds, because Python and NumPy return the state of their
generators number by number. Both are one block of memory: Python's is the tail of the object, NumPy's is at the address
that its `ctypes` interface returns. That block is copied as a whole and decoded only if it is needed. It is not even
copied while its position and another word are unchanged, because most steps use neither generator. Its layout is
checked once against the public state; if it differs (another interpreter), the slow method is used.

One number is not in NumPy's block: the second of a pair of normal numbers, if there is one. It is read when the note is
read, if the stream has not moved since, and otherwise taken as absent: a step that draws single normal numbers from
NumPy's global generator may draw another one in a replay.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from surefoot.core.device import generators_of, is_capturing, replace_random_states
from surefoot.core.random_state import RandomStreams, read_streams

_WORDS = 624
_BYTES = 4 * _WORDS


class StreamNote(NamedTuple):
    """The streams at one moment. `full` returns them like `read_streams`."""

    python: bytes | None
    """Position and words as in memory; `None` if `public` contains them."""
    gauss: float | None
    numpy: bytes | None
    torch: Tensor
    devices: tuple[tuple[int, Tensor], ...]
    """The states of the generators of some devices, by index."""
    public: RandomStreams | None
    """All streams, if the slow method had to be used."""

    def full(self) -> RandomStreams:
        """The same as `core.random_state.read_streams`; devices that were not recorded have their current state."""
        if self.public is not None:
            return self.public
        assert self.python is not None
        assert self.numpy is not None
        state = read_streams()
        position, words = _split(self.python, position_first=True)
        state["python"] = {
            "version": state["python"]["version"],
            "words": torch.tensor([*words, position], dtype=torch.int64),
            "gauss": self.gauss,
        }
        position, words = _split(self.numpy, position_first=False)
        now = state["numpy"]
        moved = position != now["position"] or words != now["keys"].tolist()
        state["numpy"] = {
            "kind": now["kind"],
            "keys": torch.tensor(words, dtype=torch.int64),
            "position": position,
            "has_gauss": 0 if moved else now["has_gauss"],
            "cached": 0.0 if moved else now["cached"],
        }
        state["torch"] = self.torch
        replace_random_states(state, self.devices)
        return state


class QuickStreams:
    """Records the random streams of the process; those of accelerators only for the given devices."""

    def __init__(self, devices: Iterable[torch.device] = ()) -> None:
        self._generators = generators_of(devices)
        self._python, self._numpy = _python_block(), _numpy_block()
        self._own: Any = getattr(random, "_inst", None)

    @property
    def quick(self) -> bool:
        """Whether the blocks were found; otherwise a record takes some 80 microseconds."""
        return self._python is not None and self._numpy is not None

    def note(self) -> StreamNote:
        """The current streams. Does not wait for a device: the state of a generator is on the host."""
        devices = tuple([(index, generator.get_state()) for index, generator in self._generators])
        own = torch.get_rng_state()
        if self._python is None or self._numpy is None:
            return StreamNote(None, None, None, own, devices, read_streams())
        return StreamNote(self._python.copy(), self._own.gauss_next, self._numpy.copy(), own, devices, None)

    def note_or(self, earlier: StreamNote | None) -> StreamNote | None:
        """`note()`, or `earlier` while a graph is being recorded, when generators must not be read."""
        return earlier if is_capturing() else self.note()


class _Block:
    """The memory of one generator: its words, and its position before or after them."""

    def __init__(self, address: int, position_first: bool) -> None:
        self._address = address
        # The position, and a word that seeding changes: after seeding, the first word is always 0x80000000.
        self._glance = (address, 12) if position_first else (address + _BYTES - 4, 8)
        self._seen, self._copied = b"", b""

    def copy(self) -> bytes:
        """Its content; the last copy again if no number was drawn since."""
        seen = ctypes.string_at(*self._glance)  # every number moves the position ...
        if seen != self._seen:  # ... and going round, or seeding, changes the word
            self._seen, self._copied = seen, ctypes.string_at(self._address, _BYTES + 4)
        return self._copied


def _split(block: bytes, position_first: bool) -> tuple[int, list[int]]:
    numbers = np.frombuffer(block, dtype=np.uint32)
    if position_first:
        return int(numbers[0]), numbers[1:].tolist()
    return int(numbers[_WORDS]), numbers[:_WORDS].tolist()


def _python_block() -> _Block | None:
    """The state of Python's generator; `None` if its layout is not that of CPython."""
    generator: Any = getattr(random, "_inst", None)
    try:
        kind = type(generator).__mro__[1]  # the base class written in C
        for start in range(0, kind.__basicsize__ - _BYTES - 3, 4):
            block = _Block(id(generator) + start, position_first=True)
            position, words = _split(block.copy(), position_first=True)
            if (*words, position) == generator.getstate()[1]:
                return block
    except Exception:
        return None
    return None


def _numpy_block() -> _Block | None:
    """The state of NumPy's global generator; `None` if it is not a Mersenne twister with the known layout."""
    try:
        legacy: Any = np.random.mtrand._rand
        block = _Block(legacy._bit_generator.ctypes.state_address, position_first=False)
        kind, keys, position, *_ = legacy.get_state()
        found, words = _split(block.copy(), position_first=False)
    except Exception:
        return None
    same = kind == "MT19937" and found == position and words == keys.tolist()
    return block if same else None
