"""Choose how many of the preceding calls go into the script, and how much of their tensors.

The failing call alone is the smallest reproduction. A call that made one of its inputs is added if the tensors do not
get much larger: a script shows `relu`, `* 0` and `log`, and stops before the layer whose weights it would need.

Then rows, columns and other slices are removed from the tensors while the script fails in the same way. Which
dimensions belong together is not known, so it is tried: first all with the same position and size (the rows of the
batch), then all of the same size at any position (the inner dimension of a product), then each alone. The required
indices are found by bisection, as in delta debugging: parts are kept or removed, and the parts get smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from surefoot.replay.export.call_text import NotWritable
from surefoot.replay.export.program import Patience, Program, TrialResult, attempt, build

if TYPE_CHECKING:
    from torch import Tensor

    from surefoot.replay.export.call_recorder import CapturedCalls, Key, Ran

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


_ROUNDS = 2
_FINEST = 64
"""The maximum number of parts into which the indices are divided."""


class Axis(NamedTuple):
    """One dimension of one tensor."""

    name: str
    dim: int


def shrink(program: Program, wanted: TrialResult, patience: Patience) -> Program:
    """The program with the smallest tensors found that produce the same kinds of values."""
    leaves = dict(program.leaves)
    for _ in range(_ROUNDS):
        before = {name: leaf.shape for name, leaf in leaves.items()}
        leaves.update(_relabelled(program.text, leaves, wanted, patience))
        for axes in _groups(leaves):
            leaves.update(_fewer(program.text, leaves, axes, wanted, patience))
        if before == {name: leaf.shape for name, leaf in leaves.items()}:
            break
    return replace(program, leaves=leaves)


def _groups(leaves: dict[str, Tensor]) -> Iterator[list[Axis]]:
    """Dimensions to reduce together; recomputed after each reduction, because the sizes change."""
    for key_of in (lambda axis, size: (axis.dim, size), lambda _, size: size, lambda axis, _: axis):
        done: set[object] = set()
        while True:
            sizes = {Axis(name, dim): size for name, leaf in leaves.items() for dim, size in enumerate(leaf.shape)}
            keys = {axis: key_of(axis, size) for axis, size in sizes.items() if size > 1}
            key = next((key for key in keys.values() if key not in done), None)
            if key is None:
                break
            done.add(key)
            yield [axis for axis in keys if keys[axis] == key]


def _fewer(
    text: str, leaves: dict[str, Tensor], axes: list[Axis], wanted: TrialResult, patience: Patience
) -> dict[str, Tensor]:
    size = leaves[axes[0].name].shape[axes[0].dim]

    def fails(kept: list[int]) -> bool:
        patience.trials -= 1
        if patience.is_over:
            return False
        seen = attempt(text, _cut(leaves, axes, kept))
        return seen is not None and seen.kinds == wanted.kinds

    return _cut(leaves, axes, fewest(list(range(size)), fails))


def _relabelled(text: str, leaves: dict[str, Tensor], wanted: TrialResult, patience: Patience) -> dict[str, Tensor]:
    """Remove rows of a table that no index uses, and renumber the indices."""
    for name, indices in list(leaves.items()):
        if indices.dtype not in (torch.int64, torch.int32) or indices.numel() == 0 or int(indices.min()) < 0:
            continue
        named, renumbered = torch.unique(indices, return_inverse=True)
        for other, table in list(leaves.items()):
            for dim, size in enumerate(table.shape):
                if other == name or patience.is_over or not named.numel() < size or int(named[-1]) >= size:
                    continue
                rows = table.index_select(dim, named.to(table.device))
                candidate = {**leaves, name: renumbered.to(indices.dtype), other: rows}
                seen = attempt(text, candidate)
                if seen is not None and seen.kinds == wanted.kinds:
                    leaves, table = candidate, rows
                    break
    return leaves


def _cut(leaves: dict[str, Tensor], axes: Iterable[Axis], kept: list[int]) -> dict[str, Tensor]:
    cut = dict(leaves)
    for name, dim in axes:
        cut[name] = cut[name].index_select(dim, torch.tensor(kept, device=cut[name].device))
    return cut


def fewest(items: list[int], fails: Callable[[list[int]], bool]) -> list[int]:
    """A subset of the items that still fails, and of which no smaller tried subset fails."""
    parts = 2
    while len(items) > 1:
        width = -(-len(items) // parts)
        pieces = [range(start, min(start + width, len(items))) for start in range(0, len(items), width)]
        kept = next((each for piece in pieces if fails(each := [items[i] for i in piece])), None)
        if kept is not None:
            items, parts = kept, 2
            continue
        rests = ([item for i, item in enumerate(items) if i not in piece] for piece in pieces)
        kept = next((rest for rest in rests if fails(rest)), None) if parts > 2 else None
        if kept is not None:
            items, parts = kept, max(parts - 1, 2)
        elif width == 1 or parts >= _FINEST:
            break
        else:
            parts = min(parts * 2, len(items))
    return items
