"""Measures how long the program waits for its data loaders, and reports a batch that does not arrive.

The one method through which every iterator of every `DataLoader` returns its batches is hooked (`core.function_hooks`),
from the first call of `follow_loaders` on. The hook records when a batch is requested and when it arrives, which costs
a few microseconds. The run log's thread checks these records once a second. Iterators are held weakly.

A wait is reported when it takes longer than `ProgressAlarms.loader_seconds` and than three times the longest earlier
wait for that loader: the first batch of an epoch may always take long. Time in which the whole process was stopped does
not count (`AwakeClock`). Batches are also a sign of progress (`BatchesDrawn`): an evaluation makes no steps.

Not covered: loaders other than torch's, and the time per batch of a worker while others are ahead of it.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from surefoot.core.wording import count_of
from surefoot.record.log import RunLog, part_of
from surefoot.record.messages import BatchesDrawn, Event
from surefoot.record.progress_alarms import LOADER_STALLED, QUIET_TIMES, AwakeClock

LOOK_SECONDS = 1.0
MOST_LOADERS = 64


@dataclass(eq=False)
class LoaderWait:
    """A batch that was requested."""

    iterator: Callable[[], Any]
    """The iterator, referenced weakly."""
    loader: str
    """A description of the loader."""
    began: float
    """Seconds of `time.monotonic`."""


def _no_iterator() -> None:
    """Nothing was drawn yet."""


class LoaderNotes:
    """The records of the hook. Written by the threads that draw batches, read by the run log's thread."""

    def __init__(self) -> None:
        self.drawn = 0
        """The number of batches that all loaders have returned."""
        self.under_way: dict[int, LoaderWait] = {}
        """The current wait of each thread."""
        self._last: tuple[Callable[[], Any], str] = _no_iterator, ""
        """The iterator that returned the last batch, and a description of its loader."""
        self.longest: dict[str, float] = {}
        """The longest completed wait for each loader, in seconds."""

    def asked(self, args: Any, kwargs: Any) -> LoaderWait:
        """A batch is requested."""
        iterator = args[0]
        if self._last[0]() is not iterator:
            self._last = weakref.ref(iterator), name_of(iterator)
        wait = LoaderWait(*self._last, time.monotonic())
        self.under_way[threading.get_ident()] = wait
        return wait

    def over(self, wait: LoaderWait) -> None:
        """The batch has arrived, or the data have ended, or the loader has failed."""
        self.drawn += 1
        self.under_way.pop(threading.get_ident(), None)
        if wait.loader in self.longest or len(self.longest) < MOST_LOADERS:
            self.longest[wait.loader] = max(self.longest.get(wait.loader, 0.0), time.monotonic() - wait.began)


_notes = LoaderNotes()
_is_hooked = False
_followed: weakref.WeakKeyDictionary[object, LoaderStalls] = weakref.WeakKeyDictionary()


def follow_loaders(log: RunLog) -> None:
    """Report stalled data loaders to a log from now on; once for a log and its parts."""
    global _is_hooked
    whole, _ = part_of(log)
    seconds = None if log.progress is None else log.progress.loader_seconds
    if seconds is None or whole in _followed:
        return
    if not _is_hooked:
        from torch.utils.data.dataloader import _BaseDataLoaderIter

        from surefoot.core.function_hooks import Hook, add_hook

        add_hook(_BaseDataLoaderIter.__next__, Hook(_notes.asked, None, _notes.over), always=True)
        _is_hooked = True
    _followed[whole] = stalls = LoaderStalls(_notes, seconds)
    log.sample(stalls, LOOK_SECONDS)


class LoaderStalls:
    """Checks the records at intervals, and returns events. Used by the thread of one run log."""

    def __init__(self, notes: LoaderNotes, after_seconds: float) -> None:
        self._notes, self._after = notes, after_seconds
        self._clock = AwakeClock()
        self._drawn = notes.drawn
        self._waiting: dict[LoaderWait, float] = {}
        """The waits in progress at the last check, and their start, in seconds of the clock."""
        self._report_at: dict[LoaderWait, float] = {}

    def __call__(self) -> Iterable[Event | BatchesDrawn]:
        """The events to report now."""
        now, drawn = self._clock.tick(), self._notes.drawn
        if drawn != self._drawn:
            yield BatchesDrawn()
        self._drawn = drawn
        current = list(self._notes.under_way.values())
        for wait in [wait for wait in self._waiting if wait not in current]:
            since = self._waiting.pop(wait)
            if self._report_at.pop(wait, None) is not None:
                yield _event(f"{wait.loader} continues after {now - since:.0f} s", "info", now - since, wait)
        for wait in current:
            yield from self._look(wait, now)

    def _look(self, wait: LoaderWait, now: float) -> Iterable[Event]:
        seconds = now - self._waiting.setdefault(wait, now)
        longest = self._notes.longest.get(wait.loader, 0.0)
        limit = self._report_at.get(wait, max(self._after, QUIET_TIMES * longest))
        if seconds < limit:
            return
        self._report_at[wait] = 2 * seconds
        before = f"; the longest wait before that was {longest:.3g} s" if longest else "; it is its first batch"
        workers = "; ".join(worker_states(wait.iterator()))
        summary = (
            f"{wait.loader} has been asked for a batch for {seconds:.0f} s{before}{f'. {workers}' if workers else ''}"
        )
        yield _event(summary, "warning", seconds, wait)


def _event(summary: str, severity: Any, seconds: float, wait: LoaderWait) -> Event:
    evidence = {"seconds": round(seconds, 1), "loader": wait.loader}
    return Event("alarm", None, summary, time.time(), severity, LOADER_STALLED, evidence=evidence)


def name_of(iterator: Any) -> str:
    """A description of the loader of an iterator."""
    held = vars(iterator)
    data = type(held.get("_dataset")).__name__
    size = getattr(held.get("_index_sampler"), "batch_size", None)
    workers = held.get("_num_workers") or 0
    count = count_of(workers, "worker") if workers else "no workers"
    return f"the data loader over {data} ({'' if size is None else f'batch size {size}, '}{count})"


def worker_states(iterator: Any) -> list[str]:
    """The states of an iterator's worker processes. Does not consume the exit status, which torch needs."""
    found = []
    for number, worker in enumerate(getattr(iterator, "_workers", ())):
        pid = worker.pid
        try:
            status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except (OSError, AttributeError, TypeError):
            continue
        if status is None:
            found.append(f"worker {number} (pid {pid}) is running")
        elif status.si_code == os.CLD_EXITED:
            found.append(f"worker {number} (pid {pid}) exited with code {status.si_status}")
        else:
            found.append(f"worker {number} (pid {pid}) was killed by signal {status.si_status}")
    return found
