"""`CheckpointManager`: when to save, in the background, what to keep, and what to load.

A save copies the state (training waits only for that) and passes it to a short-lived thread, which writes one folder
(`storage.py`) and then deletes what is no longer needed (`listing.py`). `writer.py` contains that thread, `loading.py`
the loading.

A checkpoint is good when it is finite and the detectors were quiet. One that is not is kept separately as evidence: it
is never the best, `load("good")` never returns it, and it never replaces a good one of the same step.

With a full disk or a deleted folder, training continues, the save stays due, and a warning is logged at growing
intervals (`FailedSaves`). Only a state that cannot be saved at all raises, in the caller, at the first save.

If two processes save into one folder, the second is refused (`folder_lock.py`): a `TrainingStabilizer` at construction,
a manager alone at its first save. Loading needs no lock.

With several processes, every rank saves its part at the same step, independently. To stay synchronized, they save only
at multiples of `every_steps`, and wait for a writer that is still busy.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch.distributed as dist

from surefoot.core.folder_lock import rank_of_process
from surefoot.core.settings import is_number, is_whole, shown
from surefoot.errors import CheckpointError, UsageError, require
from surefoot.keep.checkpoint.listing import CheckpointInfo, by_metric, complete_steps, make_evidence
from surefoot.keep.checkpoint.loading import Loaded, Reader, listed_steps, load_first, load_path, load_step
from surefoot.keep.checkpoint.shards import whole_tensors
from surefoot.keep.checkpoint.tree import Flattened
from surefoot.keep.checkpoint.writer import CheckpointWriter, FolderClaim, SaveJob, newest_good_age, wait_for_writers
from surefoot.keep.position.workers import worker_died
from surefoot.keep.staging import Staged, stage

if TYPE_CHECKING:
    from types import TracebackType

    from surefoot.keep.checkpoint.manifest import SaveFacts
    from surefoot.keep.checkpoint.parts import SavedParts


log = logging.getLogger("surefoot")
Which = Literal["latest", "good", "best"]

_CLOCKS_DIFFER = (
    "`every_minutes` cannot be used with several processes: their clocks differ, so they would save different steps "
    "and no checkpoint would be complete. Use `every_steps`, or call `save` on all ranks at the same step."
)


class Due:
    """Tracks which steps are saved, and when the next checkpoint is due.

    A checkpoint is due at every multiple of `every_steps`, and when `every_minutes` have passed. A save that failed, or
    was not good, leaves it due, so that the next step is tried. When training returns to an earlier step, so does the
    count.

    Several processes must save the same steps, or no checkpoint is complete. So conditions of a single process (its
    clock, a busy writer, a full disk) are ignored: a save is due only at the multiples.

    In a single process, one save may wait while another is being written: the newer of the two counts as in progress.
    """

    def __init__(self, every_steps: int | None, every_minutes: float | None) -> None:
        self._every_steps, self._every_minutes = every_steps, every_minutes
        self._saved = self._asked = 0
        self._under_way: int | None = None  # single process: being written
        self._begun: int | None = None  # several processes: saved, or attempted
        self._saved_at = time.monotonic()
        self._line = 0
        # Reports of the writing thread. Only the training thread changes the counts, so no lock is needed.
        self._ended: deque[tuple[int, int, bool, float]] = deque()

    def at(self, step: int, together: bool) -> bool:
        """Whether a save is due after this step; `together` means with other processes."""
        self._take_in()
        if step < self._asked:
            self._go_back(min(self._saved, step), step)
        self._asked = step
        every = self._every_steps
        if together:
            return every is not None and step > 0 and step % every == 0 and step != self._begun
        saved = self._saved if self._under_way is None else self._under_way
        if every is not None and step // every > saved // every:
            return True
        if self._every_minutes is None or self._under_way is not None:
            return False
        return time.monotonic() - self._saved_at >= 60 * self._every_minutes

    def begin(self, step: int) -> int:
        """A save of this step starts; returns the argument for `end`."""
        self._take_in()
        self._under_way = self._begun = step
        return self._line

    def end(self, step: int, line: int, good: bool) -> None:
        """The save has ended; may be called from another thread."""
        self._ended.append((step, line, good, time.monotonic()))

    def restart(self, step: int) -> None:
        """The state of this step was loaded: it counts as saved."""
        self._go_back(step, step)
        self._begun = step
        self._saved_at = time.monotonic()

    def _take_in(self) -> None:
        while self._ended:
            step, line, good, when = self._ended.popleft()
            if line != self._line:  # training has returned to an earlier step in the meantime
                continue
            if good:
                self._saved, self._saved_at = step, when
            if step == self._under_way:
                self._under_way = None

    def _go_back(self, saved: int, step: int) -> None:
        self._line += 1
        self._saved, self._asked = saved, step
        self._under_way = self._begun = None


class CheckpointManager:
    """Saves a training state at intervals, keeps the good ones, and loads complete ones.

    >>> import tempfile, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> with CheckpointManager(tempfile.mkdtemp(), every_steps=10) as manager:
    ...     for step in range(1, 31):
    ...         if manager.due(step):
    ...             _ = manager.save({"model": model.state_dict()}, step, blocking=True)
    >>> manager.load().step
    30
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        every_steps: int | None = 1_000,
        every_minutes: float | None = None,
        keep_last: int = 3,
        keep_evidence: int = 1,
        signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1),
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        """Nothing is written before the first save; leftovers of killed processes are removed.

        Args:
            folder: the run folder, with the checkpoints in its subfolder `checkpoints`.
            every_steps: a save is due at every multiple of this.
            every_minutes: a save is also due when this time has passed since the last one. For a single process only.
            keep_last: the number of good checkpoints to keep, besides the best.
            keep_evidence: the number of checkpoints to keep that are not good.
            signals: the signals after which a `TrainingStabilizer` finishes the step, saves and exits.
            rank: this process among those that save together; by default, the rank in torch.distributed. If only rank 0
                saves, which is possible under DDP, use `rank=0, world_size=1`.
            world_size: the number of processes that save together.
        """
        _check_settings(every_steps, every_minutes, keep_last, keep_evidence, signals, rank, world_size)
        self.folder = Path(folder)
        self._place = self.folder / "checkpoints"
        self.every_steps, self.every_minutes = every_steps, every_minutes
        self.keep_last, self.keep_evidence = keep_last, keep_evidence
        self.signals = tuple(signals)
        self.postponed = 0
        """The number of requested saves that were not made, because another was being written or had just failed."""
        self._given = (rank, world_size)
        require(every_minutes is None or self.world_size == 1, _CLOCKS_DIFFER)
        self._due = Due(every_steps, every_minutes)
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._owner: Callable[[], object | None] = lambda: None
        self._claim = FolderClaim(self.folder)
        self._writer = CheckpointWriter(self._place, self._claim)
        self.events = self._writer.events
        """Called when a checkpoint is on disk, and when checkpoints cannot be written."""
        if self._place.is_dir():
            self._claim.sweep(self._place, self.rank)

    @property
    def rank(self) -> int:
        """The rank of this process among those that save together."""
        given = self._given[0]
        return given if given is not None else dist.get_rank() if _distributed() else 0

    @property
    def world_size(self) -> int:
        """The number of processes that save together."""
        given = self._given[1]
        return given if given is not None else dist.get_world_size() if _distributed() else 1

    @property
    def last_error(self) -> BaseException | None:
        """The error of the last save; `None` after a successful one."""
        return self._writer.failed_saves.last_error

    @property
    def busy(self) -> bool:
        """Whether a save would be postponed, because another is being written. Several processes wait instead."""
        return self.world_size == 1 and self._writer.is_busy

    @property
    def has_next(self) -> bool:
        """Whether a state waits for the one that is being written; see `save(after_busy=True)`."""
        return self._writer.following is not None

    def drop_next(self) -> None:
        """Drop the state that waits for the one that is being written."""
        self._writer.drop_next()

    def belong_to(self, owner: object) -> None:
        """Save the state of this owner from now on; `check_owner` then refuses an earlier one."""
        self._owner = weakref.ref(owner)

    def check_owner(self, owner: object) -> None:
        """Raise `UsageError` if the manager was passed to another owner since: each would load the other's state."""
        if self._owner() is not owner:
            raise UsageError(
                f"the CheckpointManager of {self.folder} was passed to two TrainingStabilizers, and each would load "
                "the state that the other saved. Pass it to one of them, with `also_save={'other': second}`, or "
                "create a CheckpointManager with its own folder for each."
            )

    def claim(self) -> None:
        """Prevent other processes from saving into the folder while this manager exists. Raises `FolderInUse`.

        Ranks of one job share it. Before torch.distributed is initialized, the launcher's environment identifies the
        job.
        """
        known = self._given[0] is not None or _distributed()
        self._claim.hold(self.rank if known else rank_of_process())

    # ---- saving -----------------------------------------------------------------------------------------------------

    def due(self, step: int) -> bool:
        """Whether the state should be saved after this step. Stays true until a good checkpoint is on disk."""
        return self._due.at(step, together=self.world_size > 1)

    def save(
        self,
        tree: Any,
        step: int,
        *,
        quiet: bool = True,
        reasons: Sequence[str] = (),
        metric: float | None = None,
        metric_given: bool = True,
        blocking: bool = False,
        unchecked: Collection[str] = (),
        staged: Staged | None = None,
        after_busy: bool = False,
        session: str | None = None,
    ) -> bool:
        """Save a state in the background. True if it has started; with `blocking`, if it is on disk.

        Args:
            tree: nested dictionaries and lists of tensors and plain values, such as state dicts.
            step: optimizer steps so far.
            quiet, reasons: whether the detectors reported nothing, and what they reported.
            metric, metric_given: the metric that selects the best, lowest first; given ones take precedence.
            blocking: wait for the disk.
            unchecked: keys of `tree` whose tensors may hold NaN and Inf, or paths such as "models.0.mask".
            staged: an existing copy of the state, which is used instead of `tree`.
            after_busy: write it after the one in progress, instead of one that waits, and do not return False.
            session: equal on all ranks, and different after each restart: parts of two sessions are not combined.
        """
        _check_save(step, self._process, self.every_minutes, self.world_size)
        self._claim.hold(self.rank)
        with self._lock:
            if not (after_busy and self.busy) and not self._writer.is_ready(wait=blocking or self.world_size > 1):
                self.postponed += 1
                return False
            started, line = time.monotonic(), self._due.begin(step)
            try:
                staged = stage(tree) if staged is None else staged
                facts = _facts(quiet, reasons, metric, metric_given, self.rank, self.world_size, session)
                # The first one is flattened here, so that a state that cannot be saved raises in the caller.
                flattened = None if self._writer.has_saved else Flattened(staged.tree, staged.spread)
                keep, done = (self.keep_last, self.keep_evidence), partial(self._due.end, step, line)
                job = SaveJob(step, staged, flattened, tuple(unchecked), facts, *keep, started, done)
            except BaseException as error:
                self._due.end(step, line, good=False)
                if isinstance(error, UsageError) or not isinstance(error, Exception) or worker_died(error):
                    raise
                self._writer.failed(error, step)  # for example, no memory for a copy: training must continue
                return False
            self._writer.start(job, blocking)
        return self.last_error is None if blocking else True

    def wait(self) -> None:
        """Wait until nothing is being written."""
        self._writer.wait()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.wait()
        self._claim.release()

    def set_aside(self, after_step: int) -> None:
        """After a rollback: this rank's checkpoints of later steps become evidence, which is loaded only by its path.

        Waits for one that is being written. A folder that cannot be renamed is kept, with a warning.
        """
        self.drop_next()
        self.wait()
        try:
            steps = listed_steps(self._place)
        except CheckpointError as error:  # loading from it raises this error
            log.warning("surefoot: checkpoints of steps that were undone cannot be set aside: %s", error)
            return
        for listing in steps:
            if listing.step > after_step and not listing.aside and self.rank in listing.paths:
                make_evidence(listing.paths[self.rank], listing.step, self.rank)

    # ---- listing and loading ----------------------------------------------------------------------------------------

    def checkpoints(self) -> list[CheckpointInfo]:
        """The checkpoints that are complete according to manifests and sizes, newest first."""
        newest_first = complete_steps(listed_steps(self._place))
        best = by_metric(newest_first)[:1]
        return [each.info(self.rank, each in best) for each in newest_first if self.rank in each.paths]

    def load(
        self,
        which: Which | int | os.PathLike[str] = "latest",
        *,
        without: Collection[int] = (),
        whole: bool = False,
        place: Callable[[SavedParts], Any] | None = None,
        shares_verifying: bool = False,
    ) -> Loaded | None:
        """Read a state, verifying every byte. Waits for one that is being written.

        `"latest"` is the newest finite checkpoint, `"good"` the newest that is also quiet, `"best"` the good one with
        the lowest metric. A damaged one is skipped with a warning. Returns `None` if there is none of the kind, and
        raises `CheckpointError` if all are damaged. A step or a path selects that one and no other. Steps in `without`
        are skipped, such as those that another rank cannot read.

        With several processes, each gets the part that it saved, and the number of processes must be the same. With
        `whole`, sharded tensors are returned complete, for any number of processes. `place` assembles the state from
        the parts of all. Processes that agree on what they load may share the verification.
        """
        self.wait()
        wait_for_writers(self._place)
        makes = (lambda parts: whole_tensors(parts.tree(parts.base))) if whole and place is None else place
        reader = Reader(self.rank, self.world_size, makes, shares_verifying)
        if isinstance(which, os.PathLike):
            loaded: Loaded | None = load_path(Path(which))
        elif type(which) is int:
            loaded = load_step(self._place, which, reader)
        elif which in ("latest", "good", "best"):
            loaded = load_first(self._place, str(which), reader, without)
        else:
            raise UsageError(
                f"`which` must be 'latest', 'good', 'best', a step or a pathlib.Path; got {which!r}. "
                "For a folder given as text use `load(Path(text))`."
            )
        if loaded is not None:
            self._due.restart(loaded.step)
        return loaded

    def newest_good_age(self, step: int) -> str:
        """A sentence with the age of the newest good checkpoint at this step: the progress that a crash would lose."""
        return newest_good_age(self._place, step)

    def __reduce__(self) -> Any:
        """Copies the settings, but not the writer."""
        settings = ("every_steps", "every_minutes", "keep_last", "keep_evidence", "signals")
        rank, world_size = self._given
        made = partial(type(self), rank=rank, world_size=world_size, **{name: getattr(self, name) for name in settings})
        return made, (self.folder,)

    def __repr__(self) -> str:
        settings = f"every_steps={self.every_steps}, every_minutes={self.every_minutes}, keep_last={self.keep_last}"
        return f"CheckpointManager({str(self.folder)!r}, {settings})"


def _check_settings(
    every_steps: int | None,
    every_minutes: float | None,
    keep_last: int,
    keep_evidence: int,
    signals: Sequence[signal.Signals],
    rank: int | None,
    world_size: int | None,
) -> None:
    require(
        every_steps is None or (is_whole(every_steps) and every_steps >= 1),
        f"`every_steps` must be a whole number of at least 1, or None; got {every_steps!r}.",
    )
    require(
        every_minutes is None or (is_number(every_minutes) and every_minutes > 0),
        f"`every_minutes` must be a number of more than 0, or None; got {every_minutes!r}.",
    )
    require(
        is_whole(keep_last) and keep_last >= 1,
        f"`keep_last` must be a whole number of at least 1, or there is nothing to return to; got {keep_last!r}.",
    )
    require(
        is_whole(keep_evidence) and keep_evidence >= 0,
        f"`keep_evidence` must be a whole number of at least 0; got {keep_evidence!r}.",
    )
    require(
        isinstance(signals, Sequence) and all(is_whole(each) for each in signals),
        f"`signals` must be a list of signals, such as [signal.SIGTERM]; got {shown(signals)}.",
    )
    require(
        (rank is None) == (world_size is None) and (rank is None or 0 <= rank < (world_size or 0)),
        f"pass `rank` and `world_size` together, with rank below world_size; got {rank!r} and {world_size!r}. "
        "Omit both to read them from torch.distributed.",
    )


def _check_save(step: int, process: int, every_minutes: float | None, world_size: int) -> None:
    if os.getpid() != process:
        raise UsageError(
            "this CheckpointManager was created in another process, before a fork, and both processes would write the "
            "same files. Create it in the process that saves."
        )
    if type(step) is not int or not 0 <= step < 10**18:
        raise UsageError(f"`step` must be a whole number of at least 0; got {step!r}.")
    if every_minutes is not None and world_size > 1:
        raise UsageError(_CLOCKS_DIFFER)


def _facts(
    quiet: bool,
    reasons: Sequence[str],
    metric: float | None,
    given: bool,
    rank: int,
    world_size: int,
    session: str | None,
) -> SaveFacts:
    number = None if metric is None else float(metric)
    facts: SaveFacts = {
        "quiet": bool(quiet),
        "reasons": [str(reason) for reason in reasons],
        "metric": number if number is None or math.isfinite(number) else repr(number),
        "metric_given": bool(given),
        "rank": rank,
        "world_size": world_size,
    }
    if session is not None:
        facts["session"] = session
    return facts


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized()
