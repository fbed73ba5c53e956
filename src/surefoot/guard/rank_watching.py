"""Whether the ranks of a stabilizer move, watched through files beside its log (`record/rank_watch.py`).

Needs `log="folder"`: each rank then has a folder of its own in there, `rank0`, `rank1` and so on, which the others can
read. A log that was opened by the user is watched too if its folder has such a name.
"""

from __future__ import annotations

import atexit
import weakref
from threading import get_ident
from typing import TYPE_CHECKING

from surefoot.record.failed_collectives import failed_collective
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
"""By folder: two stabilizers that share a log are one rank."""


class WatchedRank:
    """This rank, as its stabilizer follows it."""

    def __init__(self, log: RunLog, ranks: Ranks) -> None:
        self.clock = StepClock()
        held, trains = weakref.ref(log), get_ident()  # the log ends when nobody holds it
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
        """Whether the log is closed, and the rank no longer watched."""
        return self._is_over()

    def lost(self) -> str:
        """After a collective has failed: which rank left, in one sentence; empty if that is not known."""
        return self.watch.who_left()

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
    """Watch this rank from now on; `None` for a run of one process, and without a folder for each rank."""
    if not ranks.several or log.folder.name != f"rank{ranks.place}":
        return None
    known = _WATCHED.get(log.folder)
    if known is None or known.is_over:
        known = _WATCHED[log.folder] = WatchedRank(log, ranks)
    return known
