"""The random streams at every step, for a microsecond or two.

What makes `core.random_state.read_streams` slow, some 80 microseconds, is that Python and NumPy hand out the state of
their generators number by number. Both are one block of memory: of Python's, the tail of the object; of NumPy's, where
its own `ctypes` interface says. That block is copied whole and taken apart if it is ever needed, and not even copied as
long as its position and a word beside it are what they were, since most steps use neither. Whether it is what it is
taken for is checked once, against the public state; where it is not (another interpreter), the slow way is used.

One number is not in NumPy's block: the second of a pair of normal numbers, if one is waiting. It is taken to be as it
is when the note is read, if the stream has not moved since, and else as not there: a step that itself takes single
normal numbers from NumPy's global generator may get another one when it is run again.
"""

from __future__ import annotations

import ctypes
import random
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from surefoot.core.device import generators_of, is_capturing, replace_random_states
from surefoot.core.random_state import RandomStreams, read_streams

if TYPE_CHECKING:
    from collections.abc import Iterable

_WORDS = 624
_BYTES = 4 * _WORDS


class StreamNote(NamedTuple):
    """The streams at one moment. `full` gives them as `read_streams` does."""

    python: bytes | None
    """Position and words as they lie in memory; `None` if `public` has them."""
    gauss: float | None
    numpy: bytes | None
    torch: Tensor
    devices: tuple[tuple[int, Tensor], ...]
    """The states of the generators of some devices, by index."""
    public: RandomStreams | None
    """All of it, where it had to be read the slow way."""

    def full(self) -> RandomStreams:
        """As `surefoot.core.random_state.read_streams` gives them; devices that were not noted are as they are now."""
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
    """Notes the random streams of the process; those of accelerators for the given devices only."""

    def __init__(self, devices: Iterable[torch.device] = ()) -> None:
        self._generators = generators_of(devices)
        self._python, self._numpy = _python_block(), _numpy_block()
        self._own: Any = getattr(random, "_inst", None)

    @property
    def quick(self) -> bool:
        """Whether the blocks were found; otherwise a note takes some 80 microseconds."""
        return self._python is not None and self._numpy is not None

    def note(self) -> StreamNote:
        """The streams as they are now. Waits for no device: the state of a generator is kept on the host."""
        devices = tuple([(index, generator.get_state()) for index, generator in self._generators])
        own = torch.get_rng_state()
        if self._python is None or self._numpy is None:
            return StreamNote(None, None, None, own, devices, read_streams())
        return StreamNote(self._python.copy(), self._own.gauss_next, self._numpy.copy(), own, devices, None)

    def note_or(self, earlier: StreamNote | None) -> StreamNote | None:
        """`note()`; `earlier` while a graph is being recorded, when generators must not be read."""
        return earlier if is_capturing() else self.note()


class _Block:
    """The memory of one generator: its words, and before or behind them its position."""

    def __init__(self, address: int, position_first: bool) -> None:
        self._address = address
        # The position, and a word that seeding changes: after a seed, the first word is always 0x80000000.
        self._glance = (address, 12) if position_first else (address + _BYTES - 4, 8)
        self._seen, self._copied = b"", b""

    def copy(self) -> bytes:
        """Its contents; the last copy once more if no number was drawn since."""
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
    """The state of Python's generator; `None` if it is not laid out as in CPython."""
    generator: Any = getattr(random, "_inst", None)
    try:
        kind = type(generator).__mro__[1]  # the one written in C
        for start in range(0, kind.__basicsize__ - _BYTES - 3, 4):
            block = _Block(id(generator) + start, position_first=True)
            position, words = _split(block.copy(), position_first=True)
            if (*words, position) == generator.getstate()[1]:
                return block
    except Exception:
        return None
    return None


def _numpy_block() -> _Block | None:
    """The state of NumPy's global generator; `None` if it is not a Mersenne twister as we know it."""
    try:
        legacy: Any = np.random.mtrand._rand
        block = _Block(legacy._bit_generator.ctypes.state_address, position_first=False)
        kind, keys, position, *_ = legacy.get_state()
        found, words = _split(block.copy(), position_first=False)
    except Exception:
        return None
    same = kind == "MT19937" and found == position and words == keys.tolist()
    return block if same else None
