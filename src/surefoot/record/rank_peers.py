"""Reads the states of the other ranks from their `alive.json`, and finds the rank that the others wait for.

Reading is bounded: a rank that does not move searches for the lowest rank that is alive, which usually means one file.
Only that rank, the reader, reads the files of all ranks, some hundred per check. It writes its result to `hang.json`,
next to the folders of the ranks, where the others find it.

A hang is reported when no rank moves and at least one waits for others. The odd rank is the one that has ended, that no
longer exists or responds, or that is blocked in a line where it waits for no other. If all of them wait, it is the
one that waits in another call, another line or another step than most. A rank that works is never odd, and while one
moves, nothing is reported: the others may be waiting for it.

Not covered: ranks without a common folder, whose files cannot be found.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from surefoot.core.activity import Work, state_of, work_of
from surefoot.core.files import read_file
from surefoot.core.formats import HANG
from surefoot.record.heartbeat import Beat, read_beat
from surefoot.record.run_folder import write_json

if TYPE_CHECKING:
    from pathlib import Path

NAME = "hang.json"
Condition = Literal["alive", "unsure", "silent", "gone", "stopped", "absent"]
"""The condition of a rank's process: `silent` if its file is no longer written, `absent` if there is none."""
HangKind = Literal["ended", "gone", "stopped", "silent", "stands", "apart", "together"]
_LISTED = 64


@dataclass(frozen=True)
class PeerState:
    """The state of one rank, as read by another."""

    rank: int
    beat: Beat | None
    condition: Condition

    @property
    def is_lost(self) -> bool:
        """Whether it will never respond again, as far as can be determined."""
        return self.condition in ("gone", "silent", "stopped") or (self.beat is not None and self.has_ended)

    @property
    def has_ended(self) -> bool:
        """Whether it has ended and recorded its end."""
        return self.beat is not None and self.beat.movement == "ended"

    @property
    def waits(self) -> bool:
        """Whether it waits for other ranks, or on a GPU may do so."""
        if self.beat is None or self.condition != "alive":
            return False
        return self.beat.movement == "waits" or (self.beat.movement == "busy" and self.beat.on_device)

    @property
    def has_stopped(self) -> bool:
        """Whether it does nothing, and does not wait for other ranks."""
        return self.condition == "alive" and self.beat is not None and self.beat.movement == "stands"


@dataclass(frozen=True)
class Hang:
    """Ranks that wait for another one."""

    kind: HangKind
    ranks: list[int]
    """The odd ranks, at most 64; empty if all ranks wait in the same place."""
    step: int
    """The number of steps that the odd rank, or else the reader, has taken."""
    where: str
    """The current line of the odd rank."""
    summary: str
    seconds: float
    waiting: int
    """The number of waiting ranks."""
    waiting_rank: int
    waiting_where: str
    collectives: dict[str, str] = field(default_factory=dict)
    """The last collective of some ranks, from torch's flight recorder."""
    launch: str = ""
    time: float = 0.0
    over_after: float | None = None
    """The number of seconds after which the ranks continued."""

    def evidence(self) -> dict[str, Any]:
        """The figures, for an event or a finding."""
        return {
            "rank": self.ranks[0] if self.ranks else None,
            "ranks": self.ranks,
            "kind": self.kind,
            "step": self.step,
            "line": self.where,
            "seconds": round(self.seconds, 1),
            "waiting_ranks": self.waiting,
            "waiting_rank": self.waiting_rank,
            "waiting_line": self.waiting_where,
            **({"last_collective": self.collectives} if self.collectives else {}),
        }


class Peers:
    """The other ranks."""

    def __init__(self, top: Path, mine: Beat, silent_seconds: float) -> None:
        self._top, self._mine, self._silent_after = top, mine, silent_seconds
        self._counts: dict[int, tuple[int, float]] = {}
        """For each followed rank, the number of its last write, and the time since it changed."""
        self._work: dict[int, Work | None] = {}

    def look(self, rank: int, elapsed: float) -> PeerState:
        """Check one rank; the argument is the time in seconds since the last check."""
        beat = read_beat(self._top / f"rank{rank}")
        if beat is None or beat.launch != self._mine.launch or beat.world_size != self._mine.world_size:
            return PeerState(rank, None, "absent")
        if beat.movement == "unwatched":
            return PeerState(rank, beat, "unsure")
        known = self._counts.get(rank)
        if known is None or known[0] != beat.count:
            self._counts[rank] = (beat.count, 0.0)
            if known is not None or beat.movement == "ended":
                return PeerState(rank, beat, self._of_process(beat, "alive"))
            return PeerState(rank, beat, self._of_process(beat, "unsure"))
        unchanged = known[1] + elapsed
        self._counts[rank] = (beat.count, unchanged)
        is_silent = unchanged >= self._silent_after and beat.movement != "ended"
        return PeerState(rank, beat, self._of_process(beat, "silent" if is_silent else "alive"))

    def forget(self) -> None:
        """Stop following any rank."""
        self._counts.clear()
        self._work.clear()

    def _of_process(self, beat: Beat, otherwise: Condition) -> Condition:
        """The condition of the process according to this machine, if it runs here; else according to its file."""
        if beat.movement == "ended" or not beat.machine or beat.machine != self._mine.machine:
            return otherwise
        state = state_of(beat.process, beat.started)
        if state in ("gone", "stopped"):
            return "gone" if state == "gone" else "stopped"
        if state == "traced":
            return "unsure"
        return "unsure" if otherwise == "silent" and self._works(beat) else otherwise

    def _works(self, beat: Beat) -> bool:
        """Whether a silent process of this machine uses its CPU: one C function may block all its threads."""
        before, now = self._work.get(beat.process), work_of(beat.process)
        self._work[beat.process] = now
        return now is None or before is None or now.cpu_seconds - before.cpu_seconds > 0.05


def find_hang(seen: Sequence[PeerState], mine: Beat, seconds: float, *, is_long: bool) -> Hang | None:
    """The hang of these ranks; `None` if there is none, or it cannot be determined.

    `is_long` is whether ranks that all wait in the same place count as a hang.
    """
    if any(each.condition in ("absent", "unsure") and not each.has_ended for each in seen):
        return None
    lost = [each for each in seen if each.is_lost]
    alive = [each for each in seen if not each.is_lost]
    waiting, standing = [each for each in alive if each.waits], [each for each in alive if each.has_stopped]
    if not waiting or len(waiting) + len(standing) < len(alive):
        return None
    kind, odd = _odd(lost, waiting, standing)
    if kind == "together" and not is_long:
        return None
    others = [each for each in waiting if each not in odd] or waiting
    return _described(kind, odd, others, mine, seconds)


def _odd(
    lost: list[PeerState], waiting: list[PeerState], standing: list[PeerState]
) -> tuple[HangKind, list[PeerState]]:
    if lost:
        first = min(lost, key=lambda each: (not each.has_ended, each.beat.time if each.beat else 0.0, each.rank))
        kind: HangKind = "ended" if first.has_ended else first.condition  # type: ignore[assignment]
        return kind, [first, *(each for each in lost if each is not first)]
    if standing and len(standing) <= len(waiting):
        return "stands", standing
    if standing:  # most wait for an action of the few
        return "apart", waiting
    places = Counter(_place(each) for each in waiting)
    usual = max(places, key=lambda place: places[place])  # of several, the place of the lowest rank
    odd = [each for each in waiting if _place(each) != usual]
    return ("apart", odd) if odd else ("together", [])


def _place(each: PeerState) -> tuple[str, str, int]:
    assert each.beat is not None
    return each.beat.waits_in, each.beat.where, each.beat.step


def _described(kind: HangKind, odd: list[PeerState], others: list[PeerState], mine: Beat, seconds: float) -> Hang:
    first = odd[0].beat if odd else None
    other = others[0].beat
    assert other is not None
    chosen = [each.beat for each in (*odd[:4], *others[:4]) if each.beat is not None and each.beat.collective]
    return Hang(
        kind=kind,
        ranks=[each.rank for each in odd[:_LISTED]],
        step=first.step if first is not None else other.step,
        where=first.where if first is not None else other.where,
        summary=_summary(kind, odd, others, seconds),
        seconds=seconds,
        waiting=len(others),
        waiting_rank=others[0].rank,
        waiting_where=other.place,
        collectives={f"rank {beat.rank}": beat.collective for beat in chosen},
        launch=mine.launch,
    )


def _summary(kind: HangKind, odd: list[PeerState], others: list[PeerState], seconds: float) -> str:
    other = others[0].beat
    assert other is not None
    have = f" and {len(others) - 1} more have" if len(others) > 1 else " has"
    wait = f"rank {others[0].rank}{have} waited {seconds:.0f} s in {other.place}, after {_steps(other.step)}"
    if not odd or odd[0].beat is None:
        return f"all {len(others)} ranks have waited {seconds:.0f} s in the same place: {other.place}"
    beat = odd[0].beat
    who = f"rank {beat.rank}" + (f" (and {len(odd) - 1} more)" if len(odd) > 1 else "")
    at = f"{beat.place}, after {_steps(beat.step)}"
    state = {
        "ended": f"{who} has ended after {_steps(beat.step)} ({beat.ending or 'no reason given'})",
        "gone": f"{who} no longer exists: process {beat.process} was killed; it was last seen in {at}",
        "stopped": f"{who} is stopped: process {beat.process} was suspended by a signal in {at}",
        "silent": f"{who} does not respond (process {beat.process} on {beat.host}); it was last seen in {at}",
        "stands": f"{who} has made no progress for {max(beat.seconds, seconds):.0f} s: it is in {at}",
        "apart": f"{who} waits in another place than the others: in {at}",
        "together": "",
    }[kind]
    return f"{state}; {wait}"


def _steps(count: int) -> str:
    return f"{count:,} step" + ("" if count == 1 else "s")


def write_hang(top: Path, hang: Hang) -> None:
    """Write `hang.json`. Raises `OSError`."""
    write_json(top / NAME, {HANG.key: HANG.version, **asdict(hang)})


def forget_hang(top: Path, mine: Beat) -> None:
    """Remove the result of an earlier run in the same folder."""
    if hang_of(top, mine) is None:
        with suppress(OSError):
            os.unlink(top / NAME)


def hang_of(top: Path, mine: Beat) -> Hang | None:
    """The hang of the ranks of this start, if one was found and they have not continued since."""
    found = read_hang(top)
    if found is None or found.launch != mine.launch or found.time < mine.began or found.over_after is not None:
        return None
    return found


def read_hang(top: Path, strict: bool = False) -> Hang | None:
    """The result of the reader; `None` if there is none. With `strict`, another version raises `UsageError`."""
    try:
        held = json.loads(read_file(top / NAME))
        version = held.pop(HANG.key)
        if strict:
            HANG.check(version, str(top / NAME))
        if HANG.problem(version):
            return None
        hang = Hang(**held)
        is_sound = isinstance(hang.ranks, list) and isinstance(hang.summary, str) and isinstance(hang.step, int)
        return hang if is_sound and isinstance(hang.time, float) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
