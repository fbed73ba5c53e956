"""What moves past the beginning of an order of batches, and notices an order that cannot be repeated.

A sampler that draws from a global random stream as it goes, while the training loop draws from the same one, gives an
order that depends on both: going through the sampler again without the loop gives another. `StreamWatch` notices.
Orders that draw only as they begin, or from a stream nobody else uses, are repeated exactly.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from surefoot.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


class StreamWatch:
    """Notices when what it watches and the rest of the program draw from the same global stream, in turns.

    Every call is looked at in the beginning, two in 256 later: a look costs a tenth of a millisecond.
    """

    def __init__(self) -> None:
        self.shared: set[str] = set()
        self._calls = 0
        self._moved_outside: set[str] = set()
        self._after: _Glance | None = None

    def next(self, iterator: Iterator[Any]) -> Any:
        """The next entry of what is watched."""
        looking = self._calls < 64 or self._calls % 256 < 2
        self._calls += 1
        if not looking:
            self._after = None
            return next(iterator)
        before = _glance()
        if self._after is not None:
            self._moved_outside |= _moved(self._after, before)
        entry = next(iterator)
        self._after = _glance()
        self.shared |= _moved(before, self._after) & self._moved_outside
        return entry


class _Glance(NamedTuple):
    """The global streams at one moment."""

    random: tuple[Any, ...]
    numpy: Any
    torch: Tensor


def _glance() -> _Glance:
    return _Glance(random.getstate(), np.random.get_state(), torch.get_rng_state())


def _moved(before: _Glance, after: _Glance) -> set[str]:
    equal = {
        "random": before.random == after.random,
        "numpy": before.numpy[2:] == after.numpy[2:] and np.array_equal(before.numpy[1], after.numpy[1]),
        "torch": torch.equal(before.torch, after.torch),
    }
    return {name for name, same in equal.items() if not same}


class FollowedSampler:
    """A sampler that moves past the first entries of the pass it is made for, and may be watched."""

    def __init__(self, sampler: Any, skip: int, watch: StreamWatch | None) -> None:
        self._sampler, self._skip, self._watch = sampler, skip, watch
        self.latest: FollowedIndices | None = None

    def __iter__(self) -> FollowedIndices:
        # The iterator is made at once and asked later, as the loader does it: its draws come in the same order.
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
        """Move past what is to be skipped."""
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
