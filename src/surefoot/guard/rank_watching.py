"""Checks through files next to the log whether the ranks of a stabilizer make progress (`record/rank_watch.py`).

Needs `log="folder"`: each rank then has its own folder in there, `rank0`, `rank1` and so on, which the others can read.
A log that the user opened is also covered if its folder has such a name.
"""

from __future__ import annotations

import atexit
import weakref
from threading import get_ident
from typing import TYPE_CHECKING

from surefoot.record.collectives import failed_collective
from surefoot.record.log import uncaught
from surefoot.record.rank_watch import RankWatch
from surefoot.record.stragglers import StepClock

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from surefoot.decide.agreement import Ranks
    from surefoot.record.log import RunLog
    from surefoot.record.messages import Event

_WATCHED: dict[Path, WatchedRank] = {}
"""By folder: two stabilizers that share a log count as one rank."""


class WatchedRank:
    """This rank, as observed by its stabilizer."""

    def __init__(self, log: RunLog, ranks: Ranks) -> None:
        self.clock = StepClock()
        held, trains = weakref.ref(log), get_ident()  # the log ends when nothing references it
        self._is_over = _over(held)
        self.watch = RankWatch(
            log.folder,
            ranks.place,
            ranks.count,
            clock=self.clock,
            notify=_notify(held),
            thread=lambda: trains,
            is_over=self._is_over,
        ).start()
        atexit.register(self._end)

    @property
    def is_over(self) -> bool:
        """Whether the log is closed and the rank is no longer observed."""
        return self._is_over()

    def lost(self) -> str:
        """After a failed collective, the sentence that names the rank that has ended; empty if that is not known."""
        return self.watch.rank_that_ended()

    def _end(self) -> None:
        error = uncaught()
        words = "exit code 0" if error is None else f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        self.watch.end(int(error is not None), words, follows=failed_collective(error) is not None)


def _notify(held: weakref.ref[RunLog]) -> Callable[[Event], None]:
    def notify(event: Event) -> None:
        log = held()
        if log is not None:
            log.take(event)

    return notify


def _over(held: weakref.ref[RunLog]) -> Callable[[], bool]:
    def is_over() -> bool:
        log = held()
        return log is None or log.closed

    return is_over


def watch_rank(log: RunLog, ranks: Ranks) -> WatchedRank | None:
    """Observe this rank from now on; `None` for a run of one process, or without a folder for each rank."""
    if not ranks.several or log.folder.name != f"rank{ranks.place}":
        return None
    known = _WATCHED.get(log.folder)
    if known is None or known.is_over:
        known = _WATCHED[log.folder] = WatchedRank(log, ranks)
    return known
