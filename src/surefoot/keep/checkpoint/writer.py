"""Writes checkpoints in the background, one at a time, and deletes what is no longer needed.

A copied state is passed to a short-lived thread. The thread is not a daemon: a script that ends waits for its last
checkpoint. One more state can wait for that thread; a newer one replaces it. Failures are logged (`FailedSaves`),
the save stays due, and training continues.

`FolderClaim` prevents other processes from saving into the same folder while the manager, or a thread that writes for
it, exists.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakSet, WeakValueDictionary

from surefoot.core.folder_lock import Hold, hold
from surefoot.errors import FolderInUse
from surefoot.keep.checkpoint.folders import discard, sweep
from surefoot.keep.checkpoint.listing import (
    complete_steps,
    last_number,
    list_checkpoints,
    part_name,
    rank_of,
    to_discard,
)
from surefoot.keep.checkpoint.storage import write_flat
from surefoot.keep.checkpoint.tree import Flattened

if TYPE_CHECKING:
    from pathlib import Path

    from surefoot.keep.checkpoint.manifest import Manifest, SaveFacts
    from surefoot.keep.staging import Staged

log = logging.getLogger("surefoot")

HEAD_START_SECONDS = 0.003
"""A new thread holds the interpreter for up to 5 ms while the one that started it waits; so it sleeps first."""
SLOW_SECONDS = 1.0
"""A failed save that took longer than this is retried only after ten times as long, to avoid slowing training down."""

_WRITERS: WeakValueDictionary[str, CheckpointWriter] = WeakValueDictionary()
"""The writer of this process that saved each path: two in one folder, as for a GAN, would overwrite each other."""
_ALL: WeakSet[CheckpointWriter] = WeakSet()
"""The writers of this process, for a manager that loads while another one is still writing."""


class SaveJob(NamedTuple):
    """One state to be written."""

    step: int
    staged: Staged
    flattened: Flattened | None
    """Created by the writer if it was not created before."""
    unchecked: Collection[str]
    """Keys or paths whose tensors may hold NaN and Inf."""
    facts: SaveFacts
    keep_last: int
    keep_evidence: int
    started: float
    done: Callable[[bool], None]
    """Called when the job has ended, with whether a good checkpoint was written."""


@dataclass
class SaveEvents:
    """Functions that the writing thread calls. A `TrainingStabilizer` sets them to log the events."""

    before_saved: Callable[[], object] = lambda: None
    """A checkpoint is about to be written. What a run that continues from it will not repeat must be on disk."""
    on_saved: Callable[[int, Path, SaveFacts], None] = lambda step, path, facts: None
    """A checkpoint is on disk."""
    on_failing: Callable[[int, str, dict[str, object]], None] = lambda step, message, evidence: None
    """Checkpoints cannot be written, or can be written again."""


class FolderClaim:
    """The locks of this process on a run folder, by rank.

    They are released when there are no references to the claim.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._holds: dict[int, Hold] = {}
        weakref.finalize(self, _release, self._holds).atexit = False  # the end of the process releases them

    def hold(self, rank: int) -> None:
        """Lock the folder for the checkpoints of a rank. Raises `FolderInUse`."""
        if rank not in self._holds or not self._holds[rank].is_held:
            self._holds[rank] = hold(self._folder, "checkpoints", rank)

    def release(self) -> None:
        """Release the locks."""
        _release(self._holds)

    def sweep(self, place: Path, rank: int) -> None:
        """Remove unfinished work of dead processes, unless another process, perhaps on another machine, is working."""
        try:
            lock = hold(self._folder, "checkpoints", rank)
        except (FolderInUse, OSError):
            return
        with suppress(OSError):  # the first save will report it
            sweep(place, lambda name: rank_of(name) == rank)
        lock.release()


def _release(holds: dict[int, Hold]) -> None:
    while holds:
        holds.popitem()[1].release()


class CheckpointWriter:
    """Writes states into a folder of checkpoints, one after the other."""

    def __init__(self, place: Path, claim: FolderClaim) -> None:
        self._place = place
        self._claim = claim  # also referenced by the writing thread
        self.events = SaveEvents()
        self.failed_saves = FailedSaves()
        self.has_saved = False
        """Whether a state has been flattened and written to disk before."""
        self._thread: threading.Thread | None = None
        self.following: SaveJob | None = None
        """The state that waits for the one that is being written."""
        self._takes_jobs = False
        self._taking = threading.Lock()  # the thread ends only if there is no new job
        self._not_before = 0.0
        self._folder_seen = place.is_dir()
        self._warned_broken = self._warned_missing_parts = self._warned_sharing = False
        _ALL.add(self)

    @property
    def is_busy(self) -> bool:
        """Whether a state is being written."""
        return self._takes_jobs and self._thread is not None and self._thread.is_alive()

    def is_ready(self, wait: bool) -> bool:
        """Whether a save can start now; with `wait`, after the one that is being written."""
        if wait:
            self.wait()
            return True
        if self.is_busy:
            log.debug("a checkpoint is due, but the previous one is still being written; it will be saved after that.")
            return False
        return time.monotonic() >= self._not_before

    def wait(self) -> None:
        """Return when nothing is being written."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def drop_next(self) -> None:
        """Drop the waiting state: a newer one is about to be copied."""
        self._take(None)

    def start(self, job: SaveJob, blocking: bool) -> None:
        """Write a state in a thread, after the one in progress; directly if `blocking` or if no thread can start."""
        # After the main thread has ended, at exit, Python no longer waits for new threads.
        if blocking or not threading.main_thread().is_alive():
            self.wait()
            self._write(job)
            return
        if self._take(job):
            return
        self._thread = threading.Thread(target=self._write_later, args=(job,), name="surefoot-checkpoint", daemon=False)
        self._takes_jobs = True
        try:
            self._thread.start()
        except RuntimeError:  # no more threads can be started
            self._thread, self._takes_jobs = None, False
            self._write(job)

    def _write_later(self, job: SaveJob) -> None:
        time.sleep(HEAD_START_SECONDS)
        present: SaveJob | None = job
        while present is not None:
            self._write(present)
            with self._taking:
                present, self.following = self.following, None
                self._takes_jobs = present is not None

    def _take(self, job: SaveJob | None) -> bool:
        """Make this the writing thread's next job, replacing a waiting one; False if no thread is writing."""
        with self._taking:
            if not self.is_busy:
                return False
            dropped, self.following = self.following, job
        if dropped is not None:
            dropped.done(False)
        return True

    def _write(self, job: SaveJob) -> None:
        good = finite = False
        try:
            job.staged.wait()
            flattened = job.flattened or Flattened(job.staged.tree, job.staged.spread)
            self.has_saved = True
            self._warn_if_vanished()
            job.facts["number"] = 1 + last_number(self._place)
            self._warn_if_shared(self._place / part_name(job.step, job.facts["rank"]))
            self.events.before_saved()
            manifest, place = self._written(job, flattened)
            finite = manifest.facts["finite"]
            good = finite and job.facts["quiet"]
            self._folder_seen = True
            self._warn_if_broken(job.step, manifest.facts)
            succeeded = self.failed_saves.succeeded(job.step)
            if succeeded is not None:
                self.events.on_failing(job.step, succeeded, {"failures": 0})
            self.events.on_saved(job.step, place, manifest.facts)
            self._discard_old(job)
        except Exception as error:  # training must continue after any error
            self.failed(error, job.step)
        finally:
            now = time.monotonic()
            took = now - job.started
            self._not_before = now + 10 * took if not finite and took > SLOW_SECONDS else 0.0
            job.done(good)

    def _written(self, job: SaveJob, flattened: Flattened) -> tuple[Manifest, Path]:
        """Write a state in its place or, if it is not good and a good one of the same step exists, under another name.

        Ranks must choose the same. All know whether the step was quiet; only one knows whether its part is finite.
        """
        rank, several = job.facts["rank"], job.facts["world_size"] > 1
        place = self._place / part_name(job.step, rank)

        def choose(finite: bool) -> Path:
            nonlocal place
            broken = not job.facts["quiet"] or not (finite or several)
            if broken and any(
                each.step == job.step and each.whole and each.good for each in list_checkpoints(self._place)
            ):
                place = self._place / part_name(job.step, rank, aside=True)
            return place

        manifest = write_flat(place, flattened, job.facts, step=job.step, unchecked=job.unchecked, choose=choose)
        return manifest, place

    def failed(self, error: Exception, step: int) -> None:
        """A save has failed: log it, unless that was done recently."""
        message = self.failed_saves.failed(error, step, self._place, lambda: newest_good_age(self._place, step))
        if message is not None:
            evidence = {"failures": self.failed_saves.failures, "error": f"{type(error).__name__}: {error}"}
            self.events.on_failing(step, message, evidence)

    def _warn_if_broken(self, step: int, facts: SaveFacts) -> None:
        """Warn once that the saved state is not finite, until it is again: the run itself may not detect it."""
        if not facts["finite"] and not self._warned_broken:
            log.warning(
                "surefoot: the checkpoint of step %d is not finite (%s) and is kept as evidence: a restart uses an "
                "older one. Further ones are not reported.",
                step,
                ", ".join(facts["broken"][:3]),
            )
        self._warned_broken = not facts["finite"]

    def _warn_if_vanished(self) -> None:
        if self._folder_seen and not self._place.exists():
            message = f"{self._place} was deleted with the checkpoints in it; it is created again."
            self.failed_saves.warn_once("vanished", message)

    def _warn_if_shared(self, place: Path) -> None:
        other = _WRITERS.get(str(place.absolute()))
        _WRITERS[str(place.absolute())] = self
        if other is not None and other is not self and not self._warned_sharing:
            self._warned_sharing = True
            log.warning(
                "%s was saved by another CheckpointManager of this process and is overwritten. Give each its own "
                "folder, or save both states in one tree.",
                place,
            )

    def _discard_old(self, job: SaveJob) -> None:
        rank, world_size = job.facts["rank"], job.facts["world_size"]
        try:
            steps = list_checkpoints(self._place)
            for path in to_discard(steps, rank, world_size, job.keep_last, job.keep_evidence):
                discard(path)
        except OSError as error:
            self.failed_saves.warn_once("discard", f"an old checkpoint could not be deleted: {error}.")
            return
        lacking = [each for each in steps if each.missing]
        if rank == 0 and len(lacking) > 2 and len(lacking) == len(steps) and not self._warned_missing_parts:
            self._warned_missing_parts = True
            self.failed_saves.warn_once(
                "alone",
                f"no checkpoint is complete: the parts of ranks {lacking[0].missing[:8]} are missing. Every rank must "
                "call `save`; if only rank 0 saves, use `CheckpointManager(..., rank=0, world_size=1)`.",
            )


def wait_for_writers(place: Path) -> None:
    """Return when no manager of this process is writing checkpoints in `place`."""
    for writer in list(_ALL):
        if writer._place.absolute() == place.absolute():
            writer.wait()


def newest_good_age(place: Path, step: int) -> str:
    """A sentence with the age of the newest good checkpoint at this step: the progress that a crash would lose."""
    try:
        good = [each for each in complete_steps(list_checkpoints(place)) if each.good]
    except OSError:
        good = []
    if not good:
        return "There is no good checkpoint: a restart starts from step 0."
    saved_at = datetime.fromisoformat(good[0].first.saved_at)
    seconds = max(0.0, (datetime.now(timezone.utc) - saved_at).total_seconds())
    steps = f"{step - good[0].step:,} steps and " if step > good[0].step else ""
    return f"The newest good checkpoint is from step {good[0].step}, {steps}{duration(seconds)} ago."


def duration(seconds: float) -> str:
    """A duration for people.

    >>> duration(42.4), duration(600), duration(20_000)
    ('42 s', '10 min', '5.6 h')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


GROWTH = 4
"""The factor between the numbers of failures at two messages."""
FIRST_PAUSE_SECONDS = 600.0


class FailedSaves:
    """The failures since the last successful save: training continues, and a warning is repeated at growing intervals.

    The first failure of a kind is logged immediately. While nothing can be written, it is logged again at the 4th,
    16th, 64th … consecutive failure, and after ten minutes, then twenty, then forty, each time with the age of the
    newest good checkpoint, which is the progress that a crash would lose.
    """

    def __init__(self) -> None:
        self.last_error: BaseException | None = None
        """The error of the last save; `None` after a successful one."""
        self.failures = 0
        """The number of consecutive failed saves."""
        self._logged: set[Any] = set()
        self._next, self._pause, self._again_at = GROWTH, FIRST_PAUSE_SECONDS, 0.0

    def failed(self, error: Exception, step: int, place: object, age: Callable[[], str]) -> str | None:
        """A save has failed. Returns the logged message, or `None` if one was logged recently."""
        self.last_error = error
        self.failures += 1
        kind = (type(error), getattr(error, "errno", None))
        if kind in self._logged and self.failures < self._next and time.monotonic() < self._again_at:
            return None
        if kind in self._logged:
            self._next, self._pause = self.failures * GROWTH, self._pause * 2
        self._logged.add(kind)
        self._again_at = time.monotonic() + self._pause
        many = f"; {self.failures:,} consecutive saves have failed" if self.failures > 1 else ""
        message = (
            f"the checkpoint of step {step} could not be written to {place}: {error or type(error).__name__}{many}. "
            f"Training continues, earlier checkpoints are unchanged, and the save will be tried again. {age()}"
        )
        log.warning(message, exc_info=None if isinstance(error, OSError) else error)
        return message

    def warn_once(self, kind: str, message: str) -> None:
        """Log a warning once, until a save has succeeded again."""
        if kind not in self._logged:
            self._logged.add(kind)
            log.warning(message)

    def succeeded(self, step: int) -> str | None:
        """A save has succeeded. Returns the logged message if saves had failed before."""
        message = None
        if self.last_error is not None:
            message = f"checkpoints can be written again: step {step} is on the disk."
            log.info(message)
        self.last_error, self.failures = None, 0
        self._logged.clear()
        self._next, self._pause, self._again_at = GROWTH, FIRST_PAUSE_SECONDS, 0.0
        return message
