"""One pass over a loader: new, or resumed at the batch after the last one that was used.

To resume a pass, the random streams are set to their state at its beginning, the loader creates its iterator (it draws
a seed, and its sampler a permutation, as before), and the batches that were already returned are skipped:

- a `DataLoader` over a map-style data set skips *indices*: no data is loaded, and worker streams are continued
  (`surefoot.keep.position.workers`);
- a loader with its own `state_dict` and `load_state_dict` (torchdata's `StatefulDataLoader`) does it itself;
- any other iterable is consumed and its batches are discarded, with a warning.

Some passes cannot be exact, which is logged when they are resumed: with `in_order=False`; with workers that were
started before the pass was followed; with a sampler or an iterable that alternates with the training loop in drawing
from the same global stream (`StreamWatch`): its draws cannot be repeated without the loop's.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import numpy as np
import torch

from surefoot.core.random_state import RandomStreams, read_streams, set_streams
from surefoot.errors import UsageError
from surefoot.keep.position.generators import (
    Generators,
    GeneratorStates,
    find_generators,
    read_generators,
    set_generators,
)
from surefoot.keep.position.loaders import LoaderDescription, describe, draws_once, warn_of_differences
from surefoot.keep.position.workers import FollowedWorkers, WorkerPlan, WorkerStreams, replaced, workers_followed

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("surefoot")
SLOW_SECONDS = 5.0
"""A fast-forward that takes longer than this is logged with its duration."""


class PassState(TypedDict):
    """The stored state of an active pass."""

    number: int
    count: int
    loader: LoaderDescription
    streams: RandomStreams
    generators: GeneratorStates
    workers: WorkerStreams
    base_seed: int | None
    untracked_workers: bool
    shared: list[str]
    own: Any
    """The state of a loader that has its own."""


@dataclass
class LoaderPass:
    """The current position of one pass over one loader, and its beginning."""

    number: int
    loader: LoaderDescription
    """The description of the loader: see `describe`."""
    streams: RandomStreams = field(default_factory=read_streams)
    """The process's random streams when the pass began."""
    generators: GeneratorStates = field(default_factory=dict)
    """The states of the loader's own generators when the pass began."""
    count: int = 0
    """Batches returned so far."""
    failed: int = 0
    """Batches that raised an exception since the last returned one; they count if the loop continues after them."""
    plan: WorkerPlan | None = None
    reused_workers: bool = False
    """The workers were started in an earlier pass (`persistent_workers`)."""
    untracked_workers: bool = False
    """The workers were started by other code, and their streams are not known."""
    workers_at_start: WorkerStreams | None = None
    """The workers' streams when the pass began, for a loader whose batches have to be loaded again."""
    watch: StreamWatch | None = None
    shared: list[str] = field(default_factory=list)
    """Streams that the order of the data and the loop drew from alternately, as detected in an earlier process."""

    def count_batch(self) -> None:
        """One more batch has been returned."""
        self.count += 1 + self.failed
        self.failed = 0

    def state_dict(self, own: Any) -> PassState:
        """Tensors and plain values; `own` is the state of a loader that has one."""
        plan = self.plan or WorkerPlan()
        watched = self.watch.shared if self.watch else set()
        return {
            "number": self.number,
            "count": self.count,
            "loader": self.loader.copy(),
            "streams": self.streams,
            "generators": dict(self.generators),
            "workers": plan.plain_states() if self.workers_at_start is None else self.workers_at_start,
            "base_seed": plan.base_seed if self.reused_workers else None,
            "untracked_workers": self.untracked_workers,
            "shared": sorted({*self.shared, *watched}),
            "own": own,
        }


def begin(loader: Any, number: int, workers: WorkerPlan | None = None) -> tuple[LoaderPass, Iterator[Any]]:
    """Begin a pass, exactly as `iter(loader)` does, or as it would with the workers of an earlier process."""
    generators = find_generators(loader)
    current = LoaderPass(number, describe(loader), generators=read_generators(generators))
    if workers is not None:
        _continue_workers(current, workers, generators)
    if current.loader["kind"] == "map":
        return current, _iterate_map(loader, current, 0)
    return current, _iterate(loader, current, 0)


def resume(loader: Any, saved: PassState) -> tuple[LoaderPass, Iterator[Any]]:
    """Resume a pass at its saved position. This changes the global streams, which the caller must restore."""
    now, then = describe(loader), saved["loader"]
    skip = warn_of_differences(now, then, int(saved["count"]), saved["untracked_workers"], saved["shared"])
    current = LoaderPass(
        saved["number"], now, saved["streams"], saved["generators"], skip, shared=list(saved["shared"])
    )
    generators = find_generators(loader)
    _put_back(current, generators)
    if now["kind"] == "stateful" and saved["own"] is not None:
        loader.load_state_dict(saved["own"])
        return current, iter(loader)
    if now["workers"] > 0 and now["kind"] in ("map", "stream"):
        same_workers = now["workers"] == then["workers"] and now["kind"] == then["kind"]
        current.plan = WorkerPlan(
            {int(worker): dict(states) for worker, states in saved["workers"].items()} if same_workers else {}
        )
        if same_workers and saved["base_seed"] is not None:
            current.plan.base_seed = saved["base_seed"]
            _continue_workers(current, current.plan, generators)
    if now["kind"] == "map":
        return current, _iterate_map(loader, current, skip)
    return current, _fast_forward(loader, current, skip)


def _put_back(current: LoaderPass, generators: Generators) -> None:
    """Restore the streams from the beginning of the pass."""
    set_streams(current.streams)
    set_generators(generators, current.generators)


def _continue_workers(current: LoaderPass, workers: WorkerPlan, generators: Generators) -> None:
    """Continue with workers of an earlier pass, so that this pass does not draw their seed visibly."""
    current.plan, current.reused_workers = workers, True
    workers.before_first_pass = lambda: _put_back(current, generators)


def _iterate_map(loader: Any, current: LoaderPass, skip: int) -> Iterator[Any]:
    """The iterator of a map-style loader, past its first `skip` batches."""
    if not draws_once(loader):
        current.watch = StreamWatch()
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    sampler = vars(loader)[name]
    followed = FollowedSampler(sampler, skip, current.watch)
    with ExitStack() as stack:
        if skip or current.watch is not None:
            stack.enter_context(replaced(vars(loader), name, followed))
        if loader.num_workers > 0:
            if current.plan is not None:
                current.plan.first_worker = skip % loader.num_workers
            _prepare_workers(loader, current, followed if skip or current.watch else sampler, stack)
        iterator: Any = iter(loader)
    if getattr(iterator, "_index_sampler", None) is followed:
        iterator._index_sampler = sampler  # later passes of persistent workers skip nothing
    if skip and followed.latest is not None:
        followed.latest.move()  # before the global streams are set to their saved state
    made: Iterator[Any] = iterator
    return made


def _iterate(loader: Any, current: LoaderPass, skip: int) -> Iterator[Any]:
    """The iterator of anything else, past its first `skip` batches."""
    with ExitStack() as stack:
        if current.loader["kind"] == "stream" and loader.num_workers > 0:
            _prepare_workers(loader, current, None, stack)
        iterator: Iterator[Any] = iter(loader)
    if current.loader["kind"] == "stream":
        current.workers_at_start = current.plan.plain_states() if current.plan else {}
    # Streams in workers are not shared; a list draws nothing; a loader with a state knows its draws.
    repeated = current.loader["kind"] != "stateful" and current.loader["workers"] == 0
    if repeated and not isinstance(loader, (list, tuple, range)):
        current.watch = StreamWatch()
    elif skip == 0:
        return iterator
    followed = FollowedIndices(iterator, skip, current.watch)
    followed.move()
    return followed


def _prepare_workers(loader: Any, current: LoaderPass, sampler: Any, stack: ExitStack) -> None:
    """Follow the streams of workers that will be started, or of those kept from an earlier pass."""
    kept = getattr(loader, "_iterator", None) if loader.persistent_workers else None
    if kept is not None and current.plan is not None:  # resumed: these workers do not have the saved state
        vars(loader)["_iterator"] = kept = None
    if kept is None:
        current.plan = current.plan or WorkerPlan()
        stack.enter_context(workers_followed(loader, current.plan))
        return
    if sampler is not None:
        kept._index_sampler = sampler
    if isinstance(kept, FollowedWorkers):
        current.plan, current.reused_workers = kept.surefoot_plan, True
    else:
        current.untracked_workers = True


def _fast_forward(loader: Any, current: LoaderPass, skip: int) -> Iterator[Any]:
    """Consume the batches that were returned before."""
    if skip and not isinstance(loader, Sequence):  # the batches of a sequence exist already, or are numbers
        log.warning(
            "surefoot: resuming: re-reading %d batches, because a %s cannot start in the middle. The result is the "
            "same; a loader with state_dict(), such as torchdata's StatefulDataLoader, avoids the time.",
            skip,
            current.loader["type"],
        )
    began = time.monotonic()
    iterator = _iterate(loader, current, skip)
    seconds = time.monotonic() - began
    if seconds > SLOW_SECONDS:
        log.warning("resuming: re-reading %d batches took %.0f s.", skip, seconds)
    return iterator


class StreamWatch:
    """Detects when an iterator and the rest of the program draw alternately from the same global stream.

    The order of the batches then depends on both: iterating over the sampler again without the loop gives another
    order. Orders that draw only at the beginning, or from a stream that no other code uses, are repeated exactly. Every
    call is checked in the beginning, two in 256 later: a check costs a tenth of a millisecond.
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
