"""Choose how many of the preceding calls go into the script.

The failing call alone is the smallest reproduction. A call that made one of its inputs is added if the tensors do not
get much larger: a script shows `relu`, `* 0` and `log`, and stops before the layer whose weights it would need.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from surefoot.replay.export.call_text import NotWritable
from surefoot.replay.export.program import Program, build
from surefoot.replay.export.shrink import shrink
from surefoot.replay.export.trial import Patience, TrialResult, attempt

if TYPE_CHECKING:
    from surefoot.replay.export.captured import CapturedCalls, Key, Ran

MOST_CALLS = 6
_MOST_GROWTH = 1.5
"""How many times larger the tensors of the script may be than those of the failing call alone."""


@dataclass
class Draft:
    """A program and its result in this process."""

    program: Program
    seen: TrialResult


def drafts(captured: CapturedCalls, *, backward: bool, fixed: set[Key]) -> Iterator[Draft]:
    """Reproductions of one failure, the best first: shrunk with the preceding calls, shrunk alone, unshrunk.

    `fixed` are values that are no longer those that the preceding calls had made.
    """
    alone = _draft(captured, [captured.bad], backward)
    if alone is None:
        return
    patience = Patience()
    small = _shrunk(alone, patience)
    grown, chosen, refused = small, [captured.bad], set[int]()
    while len(chosen) < MOST_CALLS and not patience.is_over:
        longer = _with_one_more(captured, chosen, grown.program, refused, fixed)
        if longer is None:
            break
        draft = _draft(captured, longer, backward)
        if draft is not None and draft.seen.kinds == alone.seen.kinds:
            draft = _shrunk(draft, patience)
            if draft.program.bytes <= _MOST_GROWTH * small.program.bytes:
                grown, chosen = draft, longer
                continue
        refused |= {id(ran) for ran in longer if ran not in chosen}
    yield grown
    yield small
    yield alone


def _draft(captured: CapturedCalls, chosen: list[Ran], backward: bool) -> Draft | None:
    try:
        program = build(captured, chosen, backward=backward)
    except NotWritable:
        return None
    seen = attempt(program.text, program.leaves)
    return None if seen is None or not seen.counts.total else Draft(program, seen)


def _shrunk(draft: Draft, patience: Patience) -> Draft:
    program = shrink(draft.program, draft.seen, patience)
    seen = attempt(program.text, program.leaves)
    same = seen is not None and seen.kinds == draft.seen.kinds
    return Draft(program, seen) if seen is not None and same else draft


def _with_one_more(
    captured: CapturedCalls, chosen: list[Ran], program: Program, refused: set[int], fixed: set[Key]
) -> list[Ran] | None:
    """The chosen calls, and the latest other one that made one of their inputs."""
    wanted = set(program.keys.values()) - fixed
    for ran in reversed(captured.calls[:-1]):
        # A random call gives way to its result; one without a place in the program is autograd's own.
        if ran in chosen or id(ran) in refused or ran.is_random or ran.place is None:
            continue
        if wanted & ran.outputs.keys():
            longer = _closed(captured, [*chosen, ran])
            if longer is not None:
                return longer
            refused.add(id(ran))
    return None


def _closed(captured: CapturedCalls, chosen: list[Ran]) -> list[Ran] | None:
    """The calls, with those that made inputs which were overwritten later; `None` if these are no longer available."""
    waiting = list(chosen)
    while waiting:
        ran = waiting.pop()
        for key in ran.inputs:
            if key in captured.values or any(key in each.outputs for each in chosen if each is not ran):
                continue
            before = captured.calls[: captured.calls.index(ran)]
            maker = next((each for each in reversed(before) if key in each.outputs and not each.is_random), None)
            if maker is None:
                return None
            chosen.append(maker)
            waiting.append(maker)
    return [ran for ran in captured.calls if ran in chosen] if len(chosen) <= MOST_CALLS else None
