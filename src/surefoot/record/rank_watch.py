"""`RankWatch`: a thread of each rank that records whether the rank moves, and finds the rank that it waits for.

The thread checks the training thread about once a second (`movement`) and writes `alive.json` into the rank's folder
every few seconds (`heartbeat`). When the rank has not moved for half of the limit, it checks the others (`rank_peers`).
After the limit, which is 30 seconds or the environment variable `SUREFOOT_HANG_SECONDS`, it writes `stacks.txt`, the
Python stacks of all its threads, and the last collectives of torch's flight recorder. Every waiting rank logs an event
that names the odd rank, and prints a line on stderr. When the rank moves again, that is logged too.

No collective is started, nothing is sent, and nothing is ended: torch's own timeout, the launcher or the user kills the
run, and by then the files exist. A failing disk ends the observation with one warning.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from surefoot.core.files import make_subfolder, write_file
from surefoot.core.redaction import Redactor
from surefoot.core.stacks import stacks_of_all
from surefoot.record.collectives import recorded_collectives
from surefoot.record.heartbeat import BeatFile, ended, first_beat, first_ended, forget_ends, mark_end
from surefoot.record.messages import Event
from surefoot.record.movement import MovementMeter
from surefoot.record.rank_peers import Hang, Peers, PeerState, find_hang, forget_hang, hang_of, write_hang
from surefoot.record.stragglers import StepClock, Straggler, StragglerSearch

if TYPE_CHECKING:
    from pathlib import Path

    from surefoot.record.heartbeat import Beat, Movement
    from surefoot.record.movement import RankState
    from surefoot.types import Severity

log = logging.getLogger("surefoot")

CAUSE = "dist.hang"
STRAGGLER = "dist.straggler"
HANG_SECONDS = 30.0
VARIABLE = "SUREFOOT_HANG_SECONDS"
STACKS, COLLECTIVES = "stacks.txt", "collectives.txt"
READ_AT_ONCE = 256
"""The number of files of other ranks that are read in one check."""
ROUND_SECONDS = 30.0
"""The time between two comparisons of all ranks' step times, by the first rank."""
LEFT_ALONE_SECONDS = 60.0
"""The time after which a rank that does not find the others reports by itself that it waits."""
ANSWER_SECONDS = 5.0
"""How long a rank whose collective has failed searches for the rank that ended, which may still be ending."""
FIRST_READERS = 32
"""This many of the lowest ranks, and each rank at a multiple of this number, may read the files of all."""
_AT_REST = ("waits", "stands", "busy")
_ASKED_OF = 64
"""With up to this many ranks, each rank checks by itself which one has ended; with more, only the first two do."""


class RankWatch:
    """Observes this rank, and the others through their files."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        world_size: int,
        *,
        clock: StepClock,
        notify: Callable[[Event], None],
        say: Callable[[str], None] | None = None,
        thread: Callable[[], int | None] = lambda: None,
        is_over: Callable[[], bool] = lambda: False,
        limit_seconds: float | None = None,
    ) -> None:
        """Observe the process that writes into `folder`, which is named `rank<number>`, next to those of the others.

        `clock` follows its steps, `thread` returns the training thread, `notify` receives events, and `say` receives
        lines for the user; without it they are warnings of the logger `surefoot`. The observation ends when `is_over`
        is true.
        """
        self._folder, self._top = folder, folder.parent
        self._notify, self._say, self._is_over = notify, say or log.warning, is_over
        self.limit = limit = limit_seconds or _limit()
        self._pause, self._beat_every = min(1.0, limit / 10), min(5.0, limit / 4)
        self._patience = limit
        """How long a rank must stand before it is reported: longer, if ranks have continued after such a stop."""
        main = threading.main_thread().ident or 0
        self._meter = MovementMeter(limit, self._pause, lambda: clock.steps, lambda: thread() or main)
        self._clock = clock
        self._beat = first_beat(rank, world_size)
        self._file = BeatFile(folder)
        self._search = HangSearch(self._top, self._beat, limit)
        self._stragglers = StragglerRounds(self._top, self._beat)
        self._process, self._closing = os.getpid(), threading.Event()
        self._unwritten = float("inf")
        """Seconds since the file was written."""
        self._has_stacks = self._has_reported_waiting = False
        self._collective, self._waits_on_device = "", False
        self._hang: Hang | None = None
        """The hang that has been reported,"""
        self._hang_step = 0
        """and the number of steps at that time."""
        self._thread = threading.Thread(target=self._run, name="surefoot-rank-watch", daemon=True)

    def start(self) -> RankWatch:
        """Start. A rank that cannot write a file or start a thread is not observed."""
        try:
            make_subfolder(self._folder)
            if self._beat.rank == 0:
                forget_ends(self._top, self._beat)
                forget_hang(self._top, self._beat)
            self._file.write(self._beat)
            self._thread.start()
        except (OSError, RuntimeError) as error:
            self._say(f"surefoot: hangs of rank {self._beat.rank} are not detected ({error}); training continues")
        return self

    def end(self, code: int, text: str, *, where: str = "", follows: bool = False) -> None:
        """The rank ends, with this exit code, description and line. `follows`: because another one has ended."""
        if os.getpid() != self._process or self._beat.movement == "ended":
            return
        self._closing.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(2.0)
        if self._hang is not None and self._clock.steps > self._hang_step:
            self._report_movement()  # it has moved since the last check
        self._beat = last = ended(replace(self._beat, step=self._clock.steps, where=where), code, text)
        with suppress(OSError):  # the log reports a full disk
            self._file.write(last)
            if not follows:
                mark_end(self._top, last)

    def rank_that_ended(self) -> str:
        """A sentence that names the rank that no longer responds; empty if it is not known after a few seconds."""
        for _ in range(int(ANSWER_SECONDS / 0.1)):
            if words := rank_that_ended(self._top, self._beat):
                return words
            time.sleep(0.1)
        return ""

    def _run(self) -> None:
        try:
            last = time.monotonic()
            while not self._closing.wait(self._pause):
                now = time.monotonic()
                if self._is_over():
                    self._file.write(replace(self._beat, count=self._beat.count + 1, movement="unwatched"))
                    return
                self.look(now - last)
                last = now
        except Exception as error:  # a full disk, or a bug: training must not be affected
            what = f"{type(error).__name__}: {error}"
            self._say(f"surefoot: hangs of rank {self._beat.rank} are no longer detected ({what}); training continues")

    def look(self, elapsed: float) -> None:
        """Check once; the argument is the time in seconds since the previous check."""
        standing = self._meter.look(elapsed)
        self._notify_others(standing, elapsed)
        if standing.seconds < self.limit / 2:
            self._report_movement()
        elif standing.movement != "debugged":
            self._look_for_others(standing, elapsed)
        if standing.movement == "moves":
            self._note_straggler(elapsed)

    def _notify_others(self, standing: RankState, elapsed: float) -> None:
        movement = self._movement(standing)
        self._unwritten += elapsed
        if movement == self._beat.movement and self._unwritten < self._beat_every:
            return
        self._unwritten = 0.0
        own_ms, step_ms, measured = self._clock.medians()
        position = standing.position
        self._beat = replace(
            self._beat,
            count=self._beat.count + 1,
            movement=movement,
            seconds=round(standing.seconds, 1),
            step=standing.step,
            where=position.where if position is not None else "",
            function=position.function if position is not None else "",
            waits_in=position.waits_in if position is not None else "",
            on_device=_uses_device(),
            collective=self._collective if movement in _AT_REST else "",
            own_ms=own_ms,
            step_ms=step_ms,
            measured_steps=measured,
            time=time.time(),
        )
        self._file.write(self._beat)

    def _movement(self, standing: RankState) -> Movement:
        """The state of the rank, after its stacks are written: on a GPU a busy rank may wait for a collective."""
        if standing.movement not in _AT_REST:
            return standing.movement
        if not self._has_stacks:
            self._has_stacks = True
            self._collective, self._waits_on_device = keep_evidence(self._folder)
        return "waits" if self._waits_on_device and _uses_device() else standing.movement

    # ---- other ranks ------------------------------------------------------------------------------------------------

    def _look_for_others(self, standing: RankState, elapsed: float) -> None:
        found = self._search.look(self._beat, standing.seconds, elapsed, self._patience)
        if found is not None and (self._hang is None or self._hang.time != found.time):
            self._hang, self._hang_step = found, self._clock.steps
            self._report(found)
        is_alone = self._search.is_alone and self._beat.movement == "waits"
        if is_alone and not self._has_reported_waiting and standing.seconds >= max(LEFT_ALONE_SECONDS, self._patience):
            self._has_reported_waiting = True
            self._report_waiting(standing)

    def _report(self, hang: Hang) -> None:
        severity: Severity = "warning" if hang.kind == "stands" else "error"
        event = Event("alarm", self._beat.step, hang.summary, time.time(), severity, CAUSE, evidence=hang.evidence())
        self._notify(event)
        self._say(f"surefoot: {hang.summary}. Stacks: {self._top}/rank*/{STACKS}")

    def _report_waiting(self, standing: RankState) -> None:
        text = (
            f"rank {self._beat.rank} has waited for other ranks for {standing.seconds:.0f} s in {self._beat.place}, "
            f"after {standing.step:,} steps; {self._top} does not hold their files, so nothing is known of them"
        )
        evidence = {"rank": self._beat.rank, "line": self._beat.where, "seconds": round(standing.seconds, 1)}
        self._notify(Event("alarm", standing.step, text, time.time(), "info", CAUSE, evidence=evidence))
        self._say(f"surefoot: {text}.")

    def _report_movement(self) -> None:
        hang, self._hang = self._hang, None
        self._has_stacks = self._has_reported_waiting = False
        self._search.stop()
        if hang is None:
            return
        seconds = time.time() - hang.time + hang.seconds
        self._patience = max(self._patience, 2 * seconds)  # this script pauses like this when it is healthy
        text = f"rank {self._beat.rank} continues after {seconds:.0f} s"
        evidence = {"rank": self._beat.rank, "over_after_seconds": round(seconds, 1)}
        self._notify(Event("alarm", self._beat.step, text, time.time(), "info", CAUSE, evidence=evidence))
        self._say(f"surefoot: {text}.")
        if self._search.wrote_last:
            write_hang(self._top, replace(hang, over_after=round(seconds, 1)))

    def _note_straggler(self, elapsed: float) -> None:
        found = self._stragglers.look(self._beat, elapsed)
        if found is not None:
            step = self._beat.step
            event = Event("alarm", step, found.summary(), time.time(), "warning", STRAGGLER, evidence=found.evidence())
            self._notify(event)


class HangSearch:
    """Searches for the rank that the others wait for, from one rank that does not move."""

    def __init__(self, top: Path, mine: Beat, limit: float) -> None:
        self._top, self._limit = top, limit
        self._peers = Peers(top, mine, limit * 2 / 3)
        self._seen: dict[int, PeerState] = {}
        self._ages: dict[int, float] = {}
        """Seconds since each rank was checked."""
        self._next = 0
        self.is_alone = False
        """Whether no file of another rank has been found."""
        self.wrote_last = False
        """Whether this rank found the last hang."""

    def stop(self) -> None:
        """The rank moves."""
        if self._seen:
            self._peers.forget()
            self._seen.clear()
            self._ages.clear()
            self._next = 0

    def look(self, mine: Beat, seconds: float, elapsed: float, patience: float) -> Hang | None:
        """A hang found by this rank, or by the rank that reads all files, after this many seconds without movement."""
        for rank in self._ages:
            self._ages[rank] += elapsed
        reader = self._reader(mine)
        if reader == mine.rank:
            self._look_at_some(mine)
        self.is_alone = not any(each.beat is not None for each in self._seen.values())
        known = hang_of(self._top, mine)
        if known is not None or reader != mine.rank:
            return known
        if seconds < self._limit or len(self._seen) < mine.world_size - 1:
            return None
        every = sorted([*self._seen.values(), PeerState(mine.rank, mine, "alive")], key=lambda each: each.rank)
        hang = find_hang(every, mine, seconds, is_long=seconds >= 2 * self._limit)
        if hang is None or (hang.kind == "stands" and seconds < patience):
            return None
        hang = replace(hang, time=time.time())
        write_hang(self._top, hang)
        self.wrote_last = True
        return hang

    def _reader(self, mine: Beat) -> int:
        """The lowest rank that is alive, which reads for all. With many ranks, only some are checked."""
        asked: list[int] = [*range(min(mine.rank, FIRST_READERS)), *range(FIRST_READERS, mine.rank, FIRST_READERS)]
        for rank in asked:
            seen = self._look_at(rank)
            if not seen.is_lost and seen.condition != "absent":
                return rank
        return mine.rank

    def _look_at_some(self, mine: Beat) -> None:
        for _ in range(min(READ_AT_ONCE, mine.world_size)):
            if self._next != mine.rank:
                self._look_at(self._next)
            self._next = (self._next + 1) % mine.world_size

    def _look_at(self, rank: int) -> PeerState:
        seen = self._seen[rank] = self._peers.look(rank, self._ages.get(rank, 0.0))
        self._ages[rank] = 0.0
        return seen


class StragglerRounds:
    """Compares the step times of all ranks at intervals, on the first rank."""

    def __init__(self, top: Path, mine: Beat) -> None:
        self._peers = Peers(top, mine, float("inf"))
        self._search = StragglerSearch()
        self._beats: list[Beat] = []
        self._next, self._waited = 0, 0.0

    def look(self, mine: Beat, elapsed: float) -> Straggler | None:
        """Read some files; at the end of a round, return a new straggler."""
        self._waited += elapsed
        if mine.rank != 0 or self._waited < ROUND_SECONDS:
            return None
        for rank in range(self._next, min(self._next + READ_AT_ONCE, mine.world_size)):
            beat = mine if rank == mine.rank else self._peers.look(rank, 0.0).beat
            self._beats += [beat] if beat is not None else []
        self._next += READ_AT_ONCE
        if self._next < mine.world_size:
            return None
        beats, self._beats, self._next, self._waited = self._beats, [], 0, 0.0
        return self._search.compare(beats) if len(beats) == mine.world_size else None


def keep_evidence(folder: Path) -> tuple[str, bool]:
    """Write this rank's stacks and last collectives; returns a description of the last, and whether it is active."""
    write_file(folder / STACKS, Redactor(identity=False)(stacks_of_all()))
    collectives = recorded_collectives()
    if not collectives:
        return "", False
    write_file(folder / COLLECTIVES, "".join(f"{each}\n" for each in collectives))
    return str(collectives[-1]), not collectives[-1].is_complete


def rank_that_ended(top: Path, mine: Beat) -> str:
    """A sentence that names the rank that no longer responds; empty if it is not known."""
    hang = hang_of(top, mine)
    if hang is not None:
        return hang.summary
    first = first_ended(top, mine)
    if first is not None and first.rank != mine.rank:
        steps = f"{first.step:,} step" + ("" if first.step == 1 else "s")
        return f"rank {first.rank} has ended after {steps} ({first.ending})"
    if mine.world_size > _ASKED_OF and mine.rank > 1:
        return ""
    peers = Peers(top, mine, float("inf"))
    for rank in range(mine.world_size):
        seen = peers.look(rank, 0.0) if rank != mine.rank else None
        if seen is not None and seen.condition == "gone" and seen.beat is not None:
            beat = seen.beat
            return f"rank {rank} is gone: its process {beat.process} was killed, last seen in {beat.place}"
    return ""


def _limit() -> float:
    try:
        return max(1.0, float(os.environ.get(VARIABLE, HANG_SECONDS)))
    except ValueError:
        return HANG_SECONDS


def _uses_device() -> bool:
    """Whether this process uses a GPU. Does not initialize one."""
    if "torch" not in sys.modules:
        return False
    from surefoot.core.device import is_in_use

    return is_in_use()
