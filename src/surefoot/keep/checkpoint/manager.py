"""`CheckpointManager`: when to save, in the background, what to keep, and what to load.

A save copies the state (training waits for that alone) and hands it to a short-lived thread, which writes one folder
(`storage.py`) and then deletes what is no longer needed (`shelf.py`). The thread is not a daemon: a script
that ends waits for its last checkpoint. There is one at a time.

A checkpoint is good when it is finite and the detectors were quiet. One that is not is kept apart as evidence: it is
never the best, `load("good")` never gives it, and it never takes the place of a good one of the same step.

Watching never kills: at a full disk or a vanished folder training goes on, the save stays due, and a warning says so,
again and again at growing intervals (`troubles.py`). Only a state that cannot be saved at all raises, in the caller, at
the first save.

Of two processes that would save into one folder the second is refused (`folder_lock.py`): a `TrainingStabilizer` when
it is made, a manager alone at its first save. Loading needs no lock.

With several processes every rank saves its part at the same step, by itself. So that they stay in step, saves fall on
multiples of `every_steps` alone, and wait for a writer that is still busy.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from weakref import WeakValueDictionary

import torch.distributed as dist

from surefoot.core.folder_lock import Hold, hold, rank_of_process
from surefoot.errors import FolderInUse, UsageError, require
from surefoot.keep.checkpoint.due import Due
from surefoot.keep.checkpoint.failed_saves import FailedSaves
from surefoot.keep.checkpoint.folders import discard, sweep
from surefoot.keep.checkpoint.listing import (
    CheckpointListing,
    by_metric,
    last_number,
    look,
    part_name,
    rank_of,
    to_discard,
    whole_ones,
)
from surefoot.keep.checkpoint.loading import Loaded, load_first, load_path, load_step, shelves
from surefoot.keep.checkpoint.storage import Manifest, write_flat
from surefoot.keep.checkpoint.tree import Flattened
from surefoot.keep.position.workers import worker_died
from surefoot.keep.staging import Staged, stage

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from types import TracebackType

log = logging.getLogger("surefoot")

Which = Literal["latest", "good", "best"]

HEAD_START_SECONDS = 0.003
"""A new thread holds the interpreter for up to 5 ms while the one that started it waits; so it begins by letting go."""
SLOW_SECONDS = 1.0
"""A save in vain that took longer than this is tried again only after ten times as long, or training would crawl."""

_WRITERS: WeakValueDictionary[str, CheckpointManager] = WeakValueDictionary()
"""Which manager of this process saved what: two in one folder, as for a GAN, would undo each other's work unseen."""

_CLOCKS_DIFFER = (
    "`every_minutes` cannot be used with several processes: their clocks would have them save different steps, and "
    "none would be whole. Use `every_steps`, or call `save` when all ranks have agreed to."
)


@dataclass(frozen=True)
class CheckpointInfo:
    """One checkpoint, as its manifest tells it."""

    step: int
    path: Path
    """The folder; of several processes, the part of this one."""
    good: bool
    """Finite and quiet: something to go back to."""
    finite: bool
    quiet: bool
    best: bool
    """Whether it is the good one with the lowest metric."""
    metric: float | None
    reasons: tuple[str, ...]
    """Why it was not quiet."""
    saved_at: str
    """When, in UTC, as ISO 8601."""
    bytes: int


class _Job(NamedTuple):
    """One state on its way to the disk."""

    step: int
    staged: Staged
    flattened: Flattened | None
    """Made by the writer if it was not made before."""
    unchecked: Collection[str]
    facts: dict[str, Any]
    started: float
    line: int


class CheckpointManager:
    """Saves a training state every so often, keeps what is worth keeping, and loads what is whole.

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
        """No checkpoint is written before the first save; leftovers of killed processes are removed.

        Args:
            folder: the run folder; checkpoints go into `checkpoints/` in it.
            every_steps: a save is due at every multiple of this.
            every_minutes: and when this long has passed since the last one. For a single process.
            keep_last: how many good checkpoints stay, beside the best.
            keep_evidence: how many of those that are not good stay.
            signals: at which a `TrainingStabilizer` finishes the step, saves and ends.
            rank: this process among those that save together; by default as torch.distributed has it. Where rank 0
                alone saves, as can be done under DDP, give it `rank=0, world_size=1`.
            world_size: how many they are.
        """
        _check_settings(every_steps, every_minutes, keep_last, keep_evidence, rank, world_size)
        self.folder = Path(folder)
        self.every_steps, self.every_minutes = every_steps, every_minutes
        self.keep_last, self.keep_evidence = keep_last, keep_evidence
        self.signals = tuple(signals)
        self.postponed = 0
        """Saves that were not made when asked for, because another was being written or had just failed."""
        self.tell_saved: Callable[[int, Path, dict[str, Any]], None] = lambda step, path, facts: None
        """Who else wants to know of a checkpoint that is on the disk; called by the thread that wrote it."""
        self.tell_failing: Callable[[int, str, dict[str, Any]], None] = lambda step, message, evidence: None
        """Who else wants to know that checkpoints cannot be written, or can be again; called by the same thread."""
        self._given = (rank, world_size)
        require(every_minutes is None or self.world_size == 1, _CLOCKS_DIFFER)
        self._due = Due(every_steps, every_minutes)
        self._troubles = FailedSaves()
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._writer: threading.Thread | None = None
        self._not_before = 0.0
        self._saved_before = self._broken_told = False
        self._there = self._place.is_dir()
        self._alone_told = self._sharing_told = False
        self._owner: Callable[[], object | None] = lambda: None
        self._holds: dict[int, Hold] = {}
        """The locks on the folder, by rank."""
        weakref.finalize(self, _release, self._holds).atexit = False  # the end of the process does it
        if self._there:
            self._sweep()

    @property
    def rank(self) -> int:
        """This process among those that save together."""
        given = self._given[0]
        return given if given is not None else dist.get_rank() if _distributed() else 0

    @property
    def world_size(self) -> int:
        """How many processes save together."""
        given = self._given[1]
        return given if given is not None else dist.get_world_size() if _distributed() else 1

    @property
    def last_error(self) -> BaseException | None:
        """What the last save failed of; `None` after one that worked."""
        return self._troubles.last_error

    @property
    def busy(self) -> bool:
        """Whether a save would be put off, since another is being written. Several processes wait instead."""
        return self.world_size == 1 and self._writer is not None and self._writer.is_alive()

    def belong_to(self, owner: object) -> None:
        """What is saved is the state of this owner from here on; `check_owner` refuses an earlier one."""
        self._owner = weakref.ref(owner)

    def check_owner(self, owner: object) -> None:
        """Raise `UsageError` if another owner has been given this manager since: each would load the other's state."""
        if self._owner() is not owner:
            raise UsageError(
                f"the CheckpointManager of {self.folder} was given to two TrainingStabilizers, and each would load "
                "what the other one saved. Give it to one alone, with `also_save={'other': second}`, or make a "
                "CheckpointManager with a folder of its own for each."
            )

    def claim(self) -> None:
        """Keep other processes from saving into the folder, as long as this manager lives. Raises `FolderInUse`.

        Ranks of one job share it. Where they are not known to torch.distributed yet, what started them tells.
        """
        known = self._given[0] is not None or _distributed()
        self._hold(self.rank if known else rank_of_process())

    def _hold(self, rank: int) -> None:
        if rank not in self._holds or not self._holds[rank].stands:
            self._holds[rank] = hold(self.folder, "checkpoints", rank)

    def _sweep(self) -> None:
        """Remove what dead processes left half done, unless a process is at work that may be on another machine."""
        try:
            held = hold(self.folder, "checkpoints", self.rank)
        except (FolderInUse, OSError):
            return
        with suppress(OSError):  # trouble that the first save will tell about
            sweep(self._place, lambda name: rank_of(name) == self.rank)
        held.release()

    # ---- saving -----------------------------------------------------------------------------------------------------

    def due(self, step: int) -> bool:
        """Whether the state should be saved after this step. Stays so until a good one is on the disk."""
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
    ) -> bool:
        """Save a state in the background. True if it is under way; if `blocking`, if it is on the disk.

        Args:
            tree: nested dictionaries and lists of tensors and plain values, such as state dicts.
            step: optimizer steps so far.
            quiet: whether the detectors had nothing to say.
            reasons: what they said.
            metric: what the best is chosen by; lower is better.
            metric_given: whether somebody chose it. Once one was, a makeshift such as the training loss counts no more.
            blocking: wait for the disk.
            unchecked: keys of `tree` whose tensors may hold NaN and Inf, or paths in it as "models.0.mask".
            staged: a copy of the state that was taken already; then `tree` is not looked at.
        """
        self._check(step)
        self._hold(self.rank)
        with self._lock:
            if not self._free(wait=blocking or self.world_size > 1):
                self.postponed += 1
                return False
            started, line = time.monotonic(), self._due.begin(step)
            try:
                staged = stage(tree) if staged is None else staged
                facts = self._facts(quiet, reasons, metric, metric_given)
                # The first one is made here, so that a state that cannot be saved raises where it was handed in.
                flattened = None if self._saved_before else Flattened(staged.tree)
                job = _Job(step, staged, flattened, tuple(unchecked), facts, started, line)
            except BaseException as error:
                self._due.end(step, line, good=False)
                if isinstance(error, UsageError) or not isinstance(error, Exception) or worker_died(error):
                    raise
                self._failed(error, step)  # no memory for a copy, say: training must go on
                return False
            self._start(job, blocking)
        return self.last_error is None if blocking else True

    def wait(self) -> None:
        """Return when nothing is being written any more."""
        writer = self._writer
        if writer is not None and writer is not threading.current_thread():
            writer.join()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.wait()
        _release(self._holds)

    # ---- what there is ----------------------------------------------------------------------------------------------

    def checkpoints(self) -> list[CheckpointInfo]:
        """Those that are whole as far as manifests and sizes tell, newest first."""
        newest_first = whole_ones(shelves(self._place))
        best = by_metric(newest_first)[:1]
        return [self._info(each, each in best) for each in newest_first if self.rank in each.paths]

    def load(self, which: Which | int | os.PathLike[str] = "latest", *, without: Collection[int] = ()) -> Loaded | None:
        """Read a state back, every byte verified. Waits for one that is being written.

        `"latest"` is the newest that is finite, `"good"` the newest that is quiet too, `"best"` the good one with the
        lowest metric. One that turns out to be damaged is passed over with a warning. `None` if there is none of the
        kind; `CheckpointError` if all are damaged. A step or a path means that one and no other. Steps in `without` are
        passed over, such as those that another rank cannot read.
        """
        self.wait()
        if isinstance(which, os.PathLike):
            loaded: Loaded | None = load_path(Path(which))
        elif type(which) is int:
            loaded = load_step(self._place, which, self.rank, self.world_size)
        elif which in ("latest", "good", "best"):
            loaded = load_first(self._place, str(which), self.rank, self.world_size, without)
        else:
            raise UsageError(
                f"`which` must be 'latest', 'good', 'best', a step or a pathlib.Path; got {which!r}. "
                "For a folder given as text use `load(Path(text))`."
            )
        if loaded is not None:
            self._due.restart(loaded.step)
        return loaded

    def _info(self, shelved: CheckpointListing, best: bool) -> CheckpointInfo:
        manifest = shelved.manifests[self.rank]
        return CheckpointInfo(
            step=shelved.step,
            path=shelved.paths[self.rank],
            good=shelved.good,
            finite=shelved.finite,
            quiet=shelved.quiet,
            best=best,
            metric=shelved.metric,
            reasons=tuple(str(reason) for reason in manifest.facts.get("reasons") or ()),
            saved_at=manifest.saved_at,
            bytes=manifest.bytes,
        )

    # ---- writing ----------------------------------------------------------------------------------------------------

    @property
    def _place(self) -> Path:
        return self.folder / "checkpoints"

    def _check(self, step: int) -> None:
        if os.getpid() != self._process:
            raise UsageError(
                "this CheckpointManager was made in another process, before a fork, and two would write the same "
                "files. Make it in the process that saves."
            )
        if type(step) is not int or not 0 <= step < 10**18:
            raise UsageError(f"`step` must be a whole number of at least 0; got {step!r}.")
        if self.every_minutes is not None and self.world_size > 1:
            raise UsageError(_CLOCKS_DIFFER)

    def _free(self, wait: bool) -> bool:
        """Whether a save can start now."""
        if wait:
            self.wait()
            return True
        if self._writer is not None and self._writer.is_alive():
            log.debug("a checkpoint was due, but the one before is still being written: it is saved after that.")
            return False
        return time.monotonic() >= self._not_before

    def _facts(self, quiet: bool, reasons: Sequence[str], metric: float | None, given: bool) -> dict[str, Any]:
        number = None if metric is None else float(metric)
        return {
            "quiet": bool(quiet),
            "reasons": [str(reason) for reason in reasons],
            "metric": number if number is None or math.isfinite(number) else repr(number),
            "metric_given": bool(given),
            "rank": self.rank,
            "world_size": self.world_size,
        }

    def _start(self, job: _Job, blocking: bool) -> None:
        # When the main thread is over, at exit, nobody waits for new threads any more.
        if blocking or not threading.main_thread().is_alive():
            self._write(job)
            return
        self._writer = threading.Thread(target=self._write_later, args=(job,), name="surefoot-checkpoint", daemon=False)
        try:
            self._writer.start()
        except RuntimeError:  # no more threads are to be had
            self._writer = None
            self._write(job)

    def _write_later(self, job: _Job) -> None:
        time.sleep(HEAD_START_SECONDS)
        self._write(job)

    def _write(self, job: _Job) -> None:
        good = finite = False
        try:
            job.staged.wait()
            flattened = Flattened(job.staged.tree) if job.flattened is None else job.flattened
            self._saved_before = True
            self._notice_vanished()
            job.facts["number"] = 1 + last_number(self._place)
            self._notice_sharing(self._place / part_name(job.step, job.facts["rank"]))
            manifest, place = self._written(job, flattened)
            finite = manifest.facts["finite"]
            good = finite and job.facts["quiet"]
            self._there = True
            self._tell_broken(job.step, manifest.facts)
            works_again = self._troubles.works_again(job.step)
            if works_again is not None:
                self.tell_failing(job.step, works_again, {"failures": 0})
            self.tell_saved(job.step, place, manifest.facts)
            self._discard_old(job)
        except Exception as error:  # whatever it is, training must go on
            self._failed(error, job.step)
        finally:
            now = time.monotonic()
            took = now - job.started
            self._not_before = now + 10 * took if not finite and took > SLOW_SECONDS else 0.0
            self._due.end(job.step, job.line, good)

    def _written(self, job: _Job, flattened: Flattened) -> tuple[Manifest, Path]:
        """Write a state in its place; where a good one of the same step is there and this one is not, beside it.

        Ranks must choose alike. Whether the step was quiet, all know; whether one's part is finite, it knows alone.
        """
        rank, several = job.facts["rank"], job.facts["world_size"] > 1
        place = self._place / part_name(job.step, rank)

        def choose(finite: bool) -> Path:
            nonlocal place
            broken = not job.facts["quiet"] or not (finite or several)
            if broken and any(each.step == job.step and each.whole and each.good for each in look(self._place)):
                place = self._place / part_name(job.step, rank, aside=True)
            return place

        options: Any = {"step": job.step, "unchecked": job.unchecked, "choose": choose}
        return write_flat(place, flattened, job.facts, **options), place

    def _failed(self, error: Exception, step: int) -> None:
        message = self._troubles.failed(error, step, self._place, lambda: self.newest_good_age(step))
        if message is not None:
            evidence = {"failures": self._troubles.failures, "error": f"{type(error).__name__}: {error}"}
            self.tell_failing(step, message, evidence)

    def newest_good_age(self, step: int) -> str:
        """A sentence on how old the newest good checkpoint is, at this step: what a crash would cost."""
        try:
            good = [each for each in whole_ones(look(self._place)) if each.good]
        except OSError:
            good = []
        if not good:
            return "There is no good checkpoint: a restart begins anew."
        saved_at = datetime.fromisoformat(good[0].first.saved_at)
        seconds = max(0.0, (datetime.now(timezone.utc) - saved_at).total_seconds())
        steps = f"{step - good[0].step:,} steps and " if step > good[0].step else ""
        return f"The newest good checkpoint is of step {good[0].step}, {steps}{duration(seconds)} ago."

    def _tell_broken(self, step: int, facts: dict[str, Any]) -> None:
        """Say once that what is saved is of no use, until it is again: the run itself may not notice."""
        if not facts["finite"] and not self._broken_told:
            log.warning(
                "surefoot: the checkpoint of step %d is not finite (%s) and is kept as evidence: a restart goes back "
                "to an older one. Later ones that are not are not told.",
                step,
                ", ".join(facts["broken"][:3]),
            )
        self._broken_told = not facts["finite"]

    def _notice_vanished(self) -> None:
        if self._there and not self._place.exists():
            self._troubles.tell("vanished", f"{self._place} has vanished with the checkpoints in it; it is made anew.")

    def _notice_sharing(self, place: Path) -> None:
        other = _WRITERS.get(str(place.absolute()))
        _WRITERS[str(place.absolute())] = self
        if other is not None and other is not self and not self._sharing_told:
            self._sharing_told = True
            log.warning(
                "%s was saved by another CheckpointManager of this process and is overwritten. Give each its own "
                "folder, or save both states in one tree.",
                place,
            )

    def _discard_old(self, job: _Job) -> None:
        rank, world_size = job.facts["rank"], job.facts["world_size"]
        try:
            steps = look(self._place)
            for path in to_discard(steps, rank, world_size, self.keep_last, self.keep_evidence):
                discard(path)
        except OSError as error:
            self._troubles.tell("discard", f"an old checkpoint could not be deleted: {error}.")
            return
        lacking = [each for each in steps if each.missing]
        if rank == 0 and len(lacking) > 2 and len(lacking) == len(steps) and not self._alone_told:
            self._alone_told = True
            self._troubles.tell(
                "alone",
                f"no checkpoint is whole: the parts of ranks {lacking[0].missing[:8]} never came. Every rank must call "
                "`save`; where rank 0 alone saves, give the CheckpointManager `rank=0, world_size=1`.",
            )

    # ---- copies -----------------------------------------------------------------------------------------------------

    def __reduce__(self) -> Any:
        """A copy has the settings, and no writer."""
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
    rank: int | None,
    world_size: int | None,
) -> None:
    require(
        every_steps is None or (type(every_steps) is int and every_steps >= 1),
        f"`every_steps` must be a whole number of at least 1, or None; got {every_steps!r}.",
    )
    require(
        every_minutes is None or every_minutes > 0,
        f"`every_minutes` must be more than 0, or None; got {every_minutes!r}.",
    )
    require(keep_last >= 1, f"`keep_last` must be at least 1, or there is nothing to go back to; got {keep_last!r}.")
    require(keep_evidence >= 0, f"`keep_evidence` must be at least 0; got {keep_evidence!r}.")
    require(
        (rank is None) == (world_size is None) and (rank is None or 0 <= rank < (world_size or 0)),
        f"`rank` and `world_size` go together, with rank below world_size; got {rank!r} and {world_size!r}. "
        "Leave both out to take them from torch.distributed.",
    )


def _release(holds: dict[int, Hold]) -> None:
    while holds:
        holds.popitem()[1].release()


def duration(seconds: float) -> str:
    """A span of time as a person would give it.

    >>> duration(42.4), duration(600), duration(20_000)
    ('42 s', '10 min', '5.6 h')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized()
