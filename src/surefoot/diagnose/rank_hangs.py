"""`dist.hang`: a rank that the others waited for, found in the files that the ranks wrote.

Three facts identify the odd rank, the most certain first. During the run, the ranks found one that does not move
(`hang.json`, see `record.rank_peers`), and it has taken no step since. Or a rank ended while the collectives of the
others failed, and has no cause of its own. Or a rank has not ended at all, in a run whose other ranks ended with failed
collectives: it was killed.

A pause after which the ranks continued has severity info: a slow disk, or a server.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from surefoot.core.wording import capital
from surefoot.diagnose.engine import EVIDENCE_RANK
from surefoot.diagnose.rule import Claim
from surefoot.record.heartbeat import Beat, read_beat, read_first_ended
from surefoot.record.rank_peers import Hang, read_hang
from surefoot.record.rank_watch import STACKS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from surefoot.diagnose.findings import Diagnosis

CODE, FAILED = "dist.hang", "dist.collective-failed"


@dataclass(frozen=True)
class HangRule:
    """The code of a hang of ranks, and the causes that it explains."""

    code: str = CODE
    explains: tuple[str, ...] = (FAILED,)


def hang_claims(
    folders: Sequence[Path], ranks: Mapping[int, Diagnosis], kinds: Mapping[str, int]
) -> list[tuple[HangRule, Claim]]:
    """The claims about ranks with these folders and diagnoses; `kinds` is the strength of the evidence of a cause."""
    if not folders:
        return []
    top, beats = folders[0].parent, _beats(folders)
    hang = read_hang(top, strict=True)
    claim = _of_hang(hang, beats) if hang is not None and _is_of_this_run(hang, beats) else None
    if claim is None or claim.severity == "info":
        claim = _of_end(read_first_ended(top, strict=True), beats, ranks, kinds) or _of_killed(beats, ranks) or claim
    return [] if claim is None else [(HangRule(), claim)]


def _beats(folders: Sequence[Path]) -> dict[int, Beat]:
    found = {int(folder.name.removeprefix("rank")): read_beat(folder, strict=True) for folder in folders}
    return {rank: beat for rank, beat in found.items() if beat is not None}


def _is_of_this_run(hang: Hang, beats: Mapping[int, Beat]) -> bool:
    """Whether the ranks of these files are those that found it: a folder may have been used twice."""
    return bool(beats) and all(beat.launch == hang.launch and beat.began <= hang.time for beat in beats.values())


def _of_hang(hang: Hang, beats: Mapping[int, Beat]) -> Claim:
    odd = hang.ranks[0] if hang.ranks else hang.waiting_rank
    later = beats.get(odd)
    went_on = hang.over_after is not None or (later is not None and later.step > hang.step)
    words = capital(hang.summary)
    if went_on:
        after = "" if hang.over_after is None else f" after {hang.over_after:.0f} s"
        return Claim(
            0.9, f"{words}. They continued{after}.", hang.step, _where(odd, hang.where), hang.evidence(), "info"
        )
    stacks = {"stacks": f"rank{odd}/{STACKS}"}
    return Claim(
        0.97, f"{words}.", hang.step, _where(odd, hang.where), hang.evidence() | stacks, fixes=(_fix(hang, odd),)
    )


def _where(rank: int, line: str) -> tuple[str, ...]:
    return (f"rank {rank}", *([line] if line else []))


def _fix(hang: Hang, odd: int) -> str:
    line = hang.where or "the line in its stack"
    return {
        "stands": f"Look at {line}, where rank {odd} did not return: add a time limit and an error to that wait, "
        f"and see rank{odd}/{STACKS}.",
        "apart": f"Let every rank call the same collectives in the same order: rank {odd} is in {line} while rank "
        f"{hang.waiting_rank} is in {hang.waiting_where}. Look for a condition on the rank around either of them.",
        "ended": "Let every rank take the same number of steps, or end all of them together: all-reduce the decision "
        "to stop.",
        "gone": f"Find out who killed the process of rank {odd}: the kernel's log names processes that took too much "
        "memory.",
        "stopped": f"Continue the process of rank {odd} (`kill -CONT`), or find out who stopped it.",
        "silent": f"Look whether the machine of rank {odd} can be reached and its process runs.",
        "together": "All ranks wait in one collective: check that they give it tensors of the same size, and that the "
        "network between them works.",
    }[hang.kind]


def _of_end(
    first: Beat | None, beats: Mapping[int, Beat], ranks: Mapping[int, Diagnosis], kinds: Mapping[str, int]
) -> Claim | None:
    """A rank ended, and the collectives of others failed."""
    left = _left_behind(ranks)
    if first is None or not left or first.rank in left or not _is_of_run(first, beats):
        return None
    own = ranks.get(first.rank)
    crash = EVIDENCE_RANK["crash"]
    if own is not None and any(kinds.get(each.cause) == crash for each in own.serious):
        return None  # its end has a known cause
    other = beats.get(left[0])
    after = f" after {other.step:,} steps" if other is not None else ""
    return Claim(
        0.95,
        f"Rank {first.rank} ended after {first.step:,} steps ({first.ending}) and the others continued: a collective "
        f"of rank {left[0]} failed{after}.",
        first.step,
        _where(first.rank, first.where),
        {
            "rank": first.rank,
            "ranks": [first.rank],
            "kind": "ended",
            "step": first.step,
            "exit_code": first.code,
            "ending": first.ending,
            "waiting_ranks": len(left),
            "waiting_rank": left[0],
            "steps_of_waiting_rank": None if other is None else other.step,
        },
        fixes=(_end_fix(first),),
    )


def _end_fix(first: Beat) -> str:
    if first.code:
        return f"Look at the error that ended rank {first.rank}: {first.ending}"
    return (
        f"Let every rank take the same number of steps: rank {first.rank} had no more batches, or left the loop on its "
        "own. All-reduce the decision to stop, or give each rank as many batches as the others."
    )


def _of_killed(beats: Mapping[int, Beat], ranks: Mapping[int, Diagnosis]) -> Claim | None:
    """A rank has not ended, and the others ended with failed collectives."""
    left = _left_behind(ranks)
    gone = [rank for rank, beat in beats.items() if beat.movement not in ("ended", "unwatched")]
    if not left or not gone or set(gone) & set(left) or len(gone) + len(left) < len(beats):
        return None
    beat, other = beats[gone[0]], beats.get(left[0])
    step = beat.step if other is None else max(beat.step, other.step)
    return Claim(
        0.9,
        f"Rank {beat.rank} did not come to an end: its process {beat.process} on {beat.host} was killed or aborted. A "
        f"collective of rank {left[0]} failed after {step:,} steps; the last report of rank {beat.rank} is from step "
        f"{beat.step:,}, in {beat.place}.",
        step,
        _where(beat.rank, beat.where),
        {
            "rank": beat.rank,
            "ranks": gone[:64],
            "kind": "gone",
            "step": step,
            "last_reported_step": beat.step,
            "waiting_ranks": len(left),
        },
        fixes=(
            f"Read the last output of rank {beat.rank} and the kernel's log, which names processes that took too much "
            "memory. If gloo aborted it (`op.preamble.length`), the ranks were in different collectives: look for one "
            "under a condition on the rank.",
        ),
    )


def _left_behind(ranks: Mapping[int, Diagnosis]) -> list[int]:
    """The ranks that ended with a failed collective."""
    return sorted(rank for rank, each in ranks.items() if any(found.cause == FAILED for found in each.serious))


def _is_of_run(first: Beat, beats: Mapping[int, Beat]) -> bool:
    return all(beat.launch == first.launch and beat.began <= first.time for beat in beats.values())
