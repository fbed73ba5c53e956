"""Skips the beginning of an order of batches, and detects an order that cannot be repeated.

If a sampler draws from a global random stream during the pass, and the training loop draws from the same one, the order
depends on both: iterating over the sampler again without the loop gives another order. `StreamWatch` detects this.
Orders that draw only at the beginning, or from a stream that no other code uses, are repeated exactly.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from surefoot.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor


class StreamWatch:
    """Detects when an iterator and the rest of the program draw alternately from the same global stream.

    Every call is checked in the beginning, two in 256 later: a check costs a tenth of a millisecond.
    """

    def __init__(self) -> None:
        self.shared: set[str] = set()
        self._calls = 0
        self._moved_outside: set[str] = set()
        self._after: _StreamStates | None = None

    def next(self, iterator: Iterator[Any]) -> Any:
        """The next entry of the observed iterator."""
        looking = self._calls < 64 or self._calls % 256 < 2
        self._calls += 1
        if not looking:
            self._after = None
            return next(iterator)
        before = _read_stream_states()
        if self._after is not None:
            self._moved_outside |= _moved(self._after, before)
        entry = next(iterator)
        self._after = _read_stream_states()
        self.shared |= _moved(before, self._after) & self._moved_outside
        return entry


class _StreamStates(NamedTuple):
    """The global streams at one moment."""

    random: tuple[Any, ...]
    numpy: Any
    torch: Tensor


def _read_stream_states() -> _StreamStates:
    return _StreamStates(random.getstate(), np.random.get_state(), torch.get_rng_state())


def _moved(before: _StreamStates, after: _StreamStates) -> set[str]:
    equal = {
        "random": before.random == after.random,
        "numpy": before.numpy[2:] == after.numpy[2:] and np.array_equal(before.numpy[1], after.numpy[1]),
        "torch": torch.equal(before.torch, after.torch),
    }
    return {name for name, same in equal.items() if not same}


class FollowedSampler:
    """A sampler that skips the first entries of its pass, and may be observed."""

    def __init__(self, sampler: Any, skip: int, watch: StreamWatch | None) -> None:
        self._sampler, self._skip, self._watch = sampler, skip, watch
        self.latest: FollowedIndices | None = None

    def __iter__(self) -> FollowedIndices:
        # The iterator is created immediately and used later, as the loader does: so its draws are in the same order.
        self.latest = FollowedIndices(iter(self._sampler), self._skip, self._watch)
        return self.latest

    def __len__(self) -> int:
        return len(self._sampler)


class FollowedIndices:
    """The iterator of a `FollowedSampler`, or of anything else that is consumed."""

    def __init__(self, inner: Iterator[Any], skip: int, watch: StreamWatch | None) -> None:
        self._inner, self._skip, self._watch = inner, skip, watch

    def __iter__(self) -> FollowedIndices:
        return self

    def __next__(self) -> Any:
        self.move()
        return next(self._inner) if self._watch is None else self._watch.next(self._inner)

    def move(self) -> None:
        """Skip the entries to be skipped."""
        skip, self._skip = self._skip, 0
        for done in range(skip):
            try:
                next(self._inner)
            except StopIteration:
                raise UsageError(
                    f"the saved position is after batch {skip} of the pass, but the loader ends after {done}: it is "
                    "not the loader that the state was saved with. Pass that loader to `resume`, or start without the "
                    "saved state."
                ) from None
