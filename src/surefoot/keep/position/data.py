"""The data position: a restarted script continues with exactly the next batch.

    for epoch in position.epochs(3):
        for batch in position.follow(loader):
            …

Passes are numbered in the order in which they begin. A restarted process runs the same script from the start: passes
that were complete when the state was saved yield nothing, and the active one continues after the last returned batch,
with bitwise the same batches and random numbers (`passes.py` describes how, and the limits). Without a loaded state,
`follow` is `iter(loader)`: no stream is touched.

The process's random streams are saved together with the model. They are set through `after_positioning`, which is
called when the position is reached: after the last of the active passes is resumed or, between passes, when the next
one begins. If nothing was drawn between the end of a pass and the save, they are set at that end.

A run that returns to an earlier moment does so in the same process: `place_of` records the position, and `rewind`
returns to it. The loop that draws the batches is the same, and gets them again. So a position can be restored as long
as the loops over the passes that were active then are still running (`why_not_back_to`).

Not covered: a position inside a batch; batches that a wrapper around `follow` has fetched ahead (they count as
returned); state of a data set that is not a random generator. A loader with its own state is responsible for it:
torchdata's does not keep the random streams of its workers, nor, between two passes, those that it draws for persistent
workers.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypedDict

from surefoot.core.formats import DATA_POSITION
from surefoot.core.nested import equal
from surefoot.core.random_state import RandomStreams, read_streams
from surefoot.errors import SettingError, require
from surefoot.keep.position.generators import find_generators
from surefoot.keep.position.loader_state import EntriesState, GeneratorState, WorkerState
from surefoot.keep.position.loaders import loader_kind, plain
from surefoot.keep.position.passes import LoaderPass, PassState, begin, resume

log = logging.getLogger("surefoot")
_MOST_PASSES = 64
"""The number of last passes that can be restored."""


class LoopsState(TypedDict):
    """What is stored about the loops."""

    ends: list[int]
    done: int
    first_pass: int
    under_way: bool


class EpochLoops:
    """The loops over `epochs()` of a run, so that completed epochs are not repeated after a restart.

    Loops are identified by their order. A loop that was left with `break` counts as ended when something new begins;
    until then it is still active, because the program may be stopping. A loop inside a loop is a plain `range`: its
    passes find their position themselves.
    """

    def __init__(self, state: LoopsState | None = None) -> None:
        self._ends: list[int] = [] if state is None else list(state["ends"])
        """The number of the pass after each loop that has ended."""
        self._done = 0 if state is None else state["done"]
        self._first_pass = 0 if state is None else state["first_pass"]
        self._resumed = state is not None and state["under_way"]
        self._entered = 0
        self._alive = False
        self._left_at: int | None = None

    @property
    def done(self) -> int:
        """Completed epochs of the current loop."""
        return self._done

    def settle(self) -> None:
        """Something new begins: a loop that was left with `break` has ended."""
        if self._left_at is not None:
            self._ends.append(self._left_at)
            self._left_at = None

    def enter(self, next_pass: int) -> tuple[int, int] | None:
        """A loop begins: returns its first epoch and the number of the next pass; `None` if it is already complete."""
        self.settle()
        number = self._entered
        self._entered += 1
        if number < len(self._ends):
            return None
        if not self._resumed:
            self._done, self._first_pass = 0, next_pass
        self._resumed, self._alive = False, True
        return self._done, self._first_pass

    def end_of_last_entered(self) -> int:
        """The number of the pass after the loop that was already complete."""
        return self._ends[self._entered - 1]

    @property
    def nested(self) -> bool:
        """Whether a loop is running: another one would be nested."""
        return self._alive

    def epoch_over(self, next_pass: int) -> None:
        """One more epoch is done."""
        self._done, self._first_pass = self._done + 1, next_pass

    def leave(self, next_pass: int, finished: bool) -> None:
        """The loop has no further epochs, or was left with `break`."""
        self._alive, self._left_at = False, next_pass
        if finished:
            self.settle()

    def state_dict(self) -> LoopsState:
        """Plain values."""
        under_way = self._alive or self._resumed or self._left_at is not None
        return {"ends": list(self._ends), "done": self._done, "first_pass": self._first_pass, "under_way": under_way}


class PositionState(TypedDict):
    """The stored position in the data."""

    schema: int
    started: int
    """The number of passes that have begun."""
    open: list[PassState]
    quiet: bool
    """Whether no random number was drawn since the last pass ended."""
    loops: LoopsState
    generators: EntriesState
    workers: EntriesState


class DataPosition:
    """Follows loaders through a run, and restores the position after a restart."""

    def __init__(self) -> None:
        self._next = 0  # the number of the pass that begins next
        self._started = 0
        self._open: dict[int, _Open] = {}
        self._loops = EpochLoops()
        self._generators = GeneratorState()
        self._workers = WorkerState()
        self._streams_at_end: RandomStreams | None = None
        self._target: PositionState | None = None
        self._waiting: set[int] = set()
        self._drawn_by: dict[int, tuple[Callable[[], FollowedPasses | None], int]] = {}
        """The iterator of each of the last passes, and the index of the pass in it."""

    @property
    def pending(self) -> bool:
        """Whether a loaded position has not been reached yet. Until then the process's streams are meaningless."""
        return self._target is not None

    def follow(
        self, loader: Any, epochs: int = 1, after_positioning: Callable[[], None] | None = None
    ) -> FollowedLoader:
        """Returns an iterable to use instead of `loader`.

        Args:
            loader: a `DataLoader`, or anything to iterate over.
            epochs: the number of passes to chain. With more than one, `set_epoch` is called on objects that have it.
            after_positioning: sets the process's random streams to their state at the save.
        """
        require(epochs >= 1, f"`epochs` must be at least 1; got {epochs}.")
        kind = SizedLoader if hasattr(loader, "__len__") else FollowedLoader
        return kind(self, loader, epochs, after_positioning)

    def epochs(self, total: int, after_positioning: Callable[[], None] | None = None) -> Iterator[int]:
        """The remaining epochs of `total`: those completed before a restart are skipped."""
        if self._loops.nested:
            yield from range(total)
            return
        entered = self._loops.enter(self._next)
        if entered is None:
            self._next = self._loops.end_of_last_entered()
            return
        first, self._next = entered
        loops, finished = self._loops, False
        try:
            for epoch in range(first, total):
                if self._target is not None and not self._waiting and self._next >= self._target["started"]:
                    self._reach(after_positioning)
                yield epoch
                loops.epoch_over(self._next)
            finished = True
        finally:
            loops.leave(self._next, finished)

    def state_dict(self) -> PositionState:
        """Tensors and plain values. Valid at any moment inside the loop body, and between passes."""
        if self._target is not None:
            return self._target
        quiet = self._streams_at_end is not None and not self._open and equal(self._streams_at_end, read_streams())
        return {
            "schema": DATA_POSITION.version,
            "started": self._started,
            "open": [each.current.state_dict(each.own_state()) for each in self._open.values()],
            "quiet": quiet,
            "loops": self._loops.state_dict(),
            "generators": self._generators.state_dict(),
            "workers": self._workers.state_dict(),
        }

    def load_state_dict(self, state: PositionState) -> None:
        """Load a saved position; afterwards, the loop starts from the beginning."""
        state = DATA_POSITION.read(state, "the data position", SettingError)
        self._next, self._started = 0, state["started"]
        self._open, self._streams_at_end = {}, None
        self._loops = EpochLoops(state["loops"])
        self._generators = GeneratorState(state["generators"])
        self._workers = WorkerState(state["workers"])
        self._target = state
        self._waiting = {saved["number"] for saved in state["open"]}

    @property
    def can_mark(self) -> bool:
        """Whether an interrupted draw can be undone. A loader with its own state may be in the middle of a change."""
        return self._target is None and all(each.current.loader["kind"] != "stateful" for each in self._open.values())

    def mark(self) -> Mark:
        """Record the position, cheaply, before a batch is drawn that may never arrive."""
        passes = [(each.current, each.current.count, each.current.failed) for each in self._open.values()]
        return Mark(passes, self._generators.read())

    def back_to(self, mark: Mark) -> bool:
        """The draw was interrupted: undo it. Its batch, if any, has not been used.

        Returns whether all of it is undone. If a pass has ended and the next has begun since the mark, the position is
        before the first batch of that one, and the random numbers drawn for this batch are not restored.
        """
        passes = {id(current): (count, failed) for current, count, failed in mark.passes}
        for each in self._open.values():
            each.current.count, each.current.failed = passes.get(id(each.current), (0, 0))
        same = len(passes) == len(self._open) and all(id(each.current) in passes for each in self._open.values())
        if same:
            self._generators.set(mark.generators)
        return same

    # ---- called by the iterators ----------------------------------------------------------------------------------

    def left(self, offset: int, length: int) -> int:
        """The number of batches left, of `length`, in the pass that is `offset` passes ahead."""
        number = self._next + offset
        if self._target is None or number >= self._target["started"]:
            return length
        saved = self._saved(number)
        return 0 if saved is None else max(0, length - saved["count"])

    def begin(
        self, loader: Any, owner: FollowedPasses, after_positioning: Callable[[], None] | None
    ) -> tuple[LoaderPass, Iterator[Any]] | None:
        """Begin or resume the next pass; `None` if it was complete when the state was saved."""
        number = self._next
        self._next += 1
        self._drawn_by[number] = weakref.ref(owner), owner.epoch
        for old in sorted(self._drawn_by)[:-_MOST_PASSES]:
            del self._drawn_by[old]
        self._loops.settle()
        # A pass whose iterator no longer exists was abandoned, and has ended. Any other is active besides this one.
        self._open = {each: entry for each, entry in self._open.items() if entry.owner() is not None}
        target = self._target
        saved = None if target is None else self._saved(number)
        again = target is not None and number < target["started"]
        self._generators.begin_pass(number, find_generators(loader), self._loops.done)
        entry = self._workers.begin_pass(number, loader, loader_kind(loader), self._loops.done)
        if again and saved is None:
            self._skip_pass(number, after_positioning)
            return None
        if not again and target is not None:
            self._reach(after_positioning)
        workers = self._workers.take(entry)
        current, iterator = begin(loader, number, workers) if saved is None else resume(loader, saved)
        self._started = max(self._started, number + 1)
        self._open[number] = _Open(current, owner, loader)
        if saved is not None:
            self._waiting.discard(number)
            if not self._waiting:
                self._reach(after_positioning)
        return current, iterator

    def end(self, current: LoaderPass) -> None:
        """A pass has come to its end."""
        if self._open.get(current.number) is not None and self._open[current.number].current is current:
            del self._open[current.number]
            self._streams_at_end = read_streams()

    def _saved(self, number: int) -> PassState | None:
        assert self._target is not None
        return next((saved for saved in self._target["open"] if saved["number"] == number), None)

    def _skip_pass(self, number: int, after_positioning: Callable[[], None] | None) -> None:
        log.info("pass %d over the data was complete when the state was saved; it is skipped.", number + 1)
        assert self._target is not None
        if self._target["quiet"] and number == self._target["started"] - 1:
            self._reach(after_positioning)
            self._streams_at_end = read_streams()

    def _reach(self, after_positioning: Callable[[], None] | None) -> None:
        """The position is reached: everything continues from the saved state."""
        self._target = None
        self._waiting = set()
        self._generators.put_back()
        if after_positioning is not None:
            after_positioning()


class DataPlace(NamedTuple):
    """A position that can be restored in the same process."""

    state: PositionState
    next: int
    """The number of the pass that would begin next."""
    generators: dict[int, Any]


class Mark(NamedTuple):
    """A position between two batches."""

    passes: list[tuple[LoaderPass, int, int]]
    """Each active pass, with its used and failed batches."""
    generators: dict[int, Any]


class FollowedLoader:
    """The result of `follow`: each iteration over it is a pass, or `epochs` of them."""

    def __init__(self, position: DataPosition, loader: Any, epochs: int, after: Callable[[], None] | None) -> None:
        self._position, self._loader, self._epochs, self._after = position, loader, epochs, after
        self._latest: Callable[[], FollowedPasses | None] = lambda: None

    def __iter__(self) -> FollowedPasses:
        passes = FollowedPasses(self._position, self._loader, self._epochs, self._after)
        self._latest = weakref.ref(passes)
        return passes


class SizedLoader(FollowedLoader):
    """The same for a loader with a length: its length is the number of remaining batches."""

    def __len__(self) -> int:
        length = len(self._loader)
        under_way = self._latest()
        if under_way is not None and under_way.current is not None:
            return max(0, length - under_way.current.count) + length * (self._epochs - under_way.epoch - 1)
        return sum(self._position.left(offset, length) for offset in range(self._epochs))


class FollowedPasses:
    """The iterator: returns the loader's batches and counts them."""

    def __init__(self, position: DataPosition, loader: Any, epochs: int, after: Callable[[], None] | None) -> None:
        self._position, self._loader, self._epochs, self._after = position, loader, epochs, after
        self.epoch = -1
        self.current: LoaderPass | None = None
        self._inner: Iterator[Any] | None = None
        self._begin_next()

    def __iter__(self) -> FollowedPasses:
        return self

    def __next__(self) -> Any:
        while self._inner is not None and self.current is not None:
            try:
                batch = next(self._inner)
            except StopIteration:
                self._finish()
                continue
            except Exception:
                self.current.failed += 1
                raise
            self.current.count_batch()
            return batch
        raise StopIteration

    def why_not_repeatable(self) -> str | None:
        """The reason why the batches cannot be drawn again; `None` if they can."""
        current = self.current
        if current is None or self._loader is None:
            return "the data has ended"
        kind = current.loader["kind"]
        if kind != "stateful" and kind != "map" and not isinstance(self._loader, (list, tuple, range)):
            return (
                f"a {current.loader['type']} cannot start in the middle; use a DataLoader over a map-style data set, "
                "or a loader with state_dict(), such as torchdata's StatefulDataLoader"
            )
        if current.untracked_workers:
            return "the loader's workers were started before `resume(loader)` was first called"
        if current.loader["workers"] > 0 and not current.loader["in_order"]:
            return "with in_order=False it is not known which batches were returned"
        shared = {*current.shared, *(current.watch.shared if current.watch else ())}
        if shared:
            return f"the sampler and the training loop draw from the same random stream ({', '.join(sorted(shared))})"
        return None

    def resume_pass(self, saved: PassState, epoch: int) -> tuple[LoaderPass, Any]:
        """Return to a saved position of a pass of this iterator; returns the pass and its loader."""
        self._inner = self.current = None  # its workers end before new ones start
        self.epoch = epoch
        if self._epochs > 1:
            _set_epoch(self._loader, epoch)
        self.current, self._inner = resume(self._loader, saved)
        return self.current, self._loader

    def _finish(self) -> None:
        assert self.current is not None
        self._position.end(self.current)
        self._inner = self.current = None
        self._begin_next()

    def _begin_next(self) -> None:
        """Begin the next pass that has something left."""
        while self._inner is None and self.epoch + 1 < self._epochs:
            self.epoch += 1
            if self._epochs > 1:
                _set_epoch(self._loader, self.epoch)
            begun = self._position.begin(self._loader, self, self._after)
            if begun is not None:
                self.current, self._inner = begun
        if self._inner is None:
            self._loader = self._after = None  # keep no reference to a finished pass


def _set_epoch(loader: Any, epoch: int) -> None:
    batch_sampler = getattr(loader, "batch_sampler", None)
    parts = [loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]
    parts.append(getattr(loader, "dataset", None))
    for part in {id(part): part for part in parts}.values():
        if callable(getattr(part, "set_epoch", None)):
            part.set_epoch(epoch)


class _Open:
    """A pass that has begun and not ended. References neither its iterator nor its loader."""

    def __init__(self, current: LoaderPass, owner: Any, loader: Any) -> None:
        self.current, self.owner = current, weakref.ref(owner)
        stateful = current.loader["kind"] == "stateful"
        self._loader = weakref.ref(loader) if stateful and hasattr(loader, "__weakref__") else lambda: None

    def own_state(self) -> Any:
        """The state of a loader that has its own."""
        loader = self._loader()
        return None if loader is None else plain(loader.state_dict(), "state_dict()")


# ---- returning to an earlier position in the same process -----------------------------------------------------------


def place_of(position: DataPosition) -> DataPlace:
    """The current position, between two batches."""
    return DataPlace(position.state_dict(), position._next, position._generators.read())


def why_not_repeatable(position: DataPosition) -> str | None:
    """The reason why the current batches cannot be drawn again; `None` if they can."""
    owners = [owner for each in position._open.values() if (owner := each.owner()) is not None]
    if position.pending or not owners:
        return "batches are not drawn from `stabilizer.resume(loader)`"
    return next((reason for owner in owners if (reason := owner.why_not_repeatable()) is not None), None)


def why_not_back_to(position: DataPosition, state: PositionState) -> str | None:
    """The reason why a recorded position cannot be restored; `None` if it can."""
    if (reason := why_not_repeatable(position)) is not None:
        return reason
    drawn_by = position._drawn_by
    then = [drawn_by[saved["number"]][0]() if saved["number"] in drawn_by else None for saved in state["open"]]
    if not then or None in then:
        return "the loop over the data that was running then has ended"
    if any((owner := each.owner()) is not None and owner not in then for each in position._open.values()):
        return "a loop over the data has begun since"
    return None


def rewind(position: DataPosition, place: DataPlace) -> None:
    """Restore a recorded position: the active iterators return the batches after it again.

    This changes the random streams of the process, which the caller must restore.
    """
    state, position._open, position._streams_at_end = place.state, {}, None
    for saved in state["open"]:
        find, epoch = position._drawn_by[saved["number"]]
        owner = find()
        assert owner is not None
        current, loader = owner.resume_pass(saved, epoch)
        position._open[saved["number"]] = _Open(current, owner, loader)
    position._next, position._started = place.next, state["started"]
    position._generators.set(place.generators)
