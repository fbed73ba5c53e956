"""How the labels of a loss correspond to token ids: the offset at which they equal the inputs, and where rows end in
padding.

Labels are often flattened, so their rows are found through the ids that embeddings looked up earlier in the same step:
with the same number of sequences, the rows of labels are as long as those of the ids, or one or two shorter (a model
that shifts them drops the last ones, or appends an ignored one). Everything is compared by value; large tensors are
reduced to their first rows. A model that is called for one time step at a time has one id per row. Not covered:
labels of images.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from surefoot.record.facts import TokenAlignment
from surefoot.watch.deferred import later, own

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from surefoot.watch.function_recorder import FunctionRecorder, RecordedCall

    Array = NDArray[Any]

MOST_EMBEDDINGS = 3
"""The number of embeddings that the labels of one loss are compared with."""
MOST_LABELS = 1 << 16
"""The maximum number of labels compared; of more, the first rows …"""
MOST_COMPARED = 2048
"""The maximum number of labels that are compared with one another."""
MOST_ROWS = 1024
"""… and never more rows than this: the most frequent of so few values can be found without waiting for a device."""
_SHUFFLES = 8
_FEWEST_PAIRS = 200
SHORTEST = 4
"""Shorter rows are not sequences."""


def alignments(
    recorder: FunctionRecorder | None, target: Tensor, ignore: int, outputs: Tensor | None = None
) -> list[TokenAlignment] | None:
    """Compare the labels with the ids of the last embeddings whose layout fits; `None` if there is none.

    `outputs` are the predictions, with one row for each label.
    """
    if recorder is None or target.is_floating_point() or target.dim() not in (1, 2) or not target.numel():
        return None
    found: list[TokenAlignment] = []
    seen: set[int] = set()
    for entry in reversed(recorder.entries):
        ids = entry.notes.ids
        if ids is None or ids.data_ptr() in seen or ids.device != target.device:
            continue
        seen.add(ids.data_ptr())
        rows = _rows(ids, target.detach())
        if ids.shape == target.shape and ids.dim() == 1 and ids.numel() >= SHORTEST:
            found.append(_of_one_step(entry, ids, target.detach(), ignore))
            break  # one time step at a time: only the last ids belong to these labels
        if rows is not None:
            aligned = _aligned(entry, *rows, ignore)
            crossed = _crossed(ids, target.detach(), outputs.detach()) if outputs is not None else None
            found.append(aligned if crossed is None else later(_with_order, aligned, *crossed))
        if len(found) == MOST_EMBEDDINGS:
            break
    return found or None


def _of_one_step(entry: RecordedCall, ids: Tensor, target: Tensor, ignore: int) -> TokenAlignment:
    """The labels of a model that is called once for each time step, with one id per row."""
    valid = target != ignore
    same = ((ids == target) & valid).sum() / valid.sum().clamp_min(1)
    return later(partial(_one_step_facts, entry.index, entry.site), same.double())


def _one_step_facts(index: int, site: str, same: float) -> TokenAlignment:
    return TokenAlignment(
        index=index,
        site=site,
        positions=1,
        same=same,
        following=0.0,
        second=0.0,
        tail_label=-1,
        tail_share=0.0,
        tail_elsewhere=0.0,
        tail_lengths=0,
        tail_padded=0.0,
    )


def _rows(ids: Tensor, target: Tensor) -> tuple[Tensor, Tensor] | None:
    """Ids and labels as matrices with one sequence per row; `None` if they do not fit together."""
    if ids.dim() != 2 or min(ids.shape) < 2:
        return None
    for turned in (False, True):  # the second attempt: time is the first dimension
        given = ids.t() if turned else ids
        count, length = given.shape
        width = target.numel() // count
        if target.numel() % count or not max(SHORTEST, length - 2) <= width <= length:
            continue
        if target.dim() == 2 and list(target.shape) != ([width, count] if turned else [count, width]):
            continue
        goals = target.reshape(width, count).t() if turned else target.reshape(count, width)
        most = min(MOST_ROWS, max(1, MOST_LABELS // length))
        return given[:most], goals[:most]
    return None


def _crossed(ids: Tensor, target: Tensor, outputs: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """How much better labels are the following ids with rows and columns swapped; ids and outputs, in one order."""
    if target.dim() != 1 or target.numel() != ids.numel() or min(ids.shape) < SHORTEST or len(outputs) != len(target):
        return None
    rows, columns = ids.shape
    readings = target.reshape(rows, columns), target.reshape(columns, rows).t()
    along = torch.stack([(goals[:, :-1] == ids[:, 1:]).double().mean() for goals in readings])
    down = torch.stack([(goals[:-1] == ids[1:]).double().mean() for goals in readings])
    best = torch.maximum(along, down)
    some = outputs.reshape(len(outputs), -1)[:MOST_COMPARED, 0].double()
    return best.diff(), ids.reshape(-1)[:MOST_COMPARED].clone(), some.clone()


def _with_order(aligned: TokenAlignment, crossed: Tensor, ids: Tensor, outputs: Tensor) -> TokenAlignment:
    return replace(aligned, crossed=crossed.tolist()[0], outputs_follow=_follow(ids.numpy(), outputs.numpy()))


def _follow(ids: Array, outputs: Array) -> float | None:
    """How much less the outputs of equal ids differ than after shuffling, in spreads of the latter."""
    if not np.isfinite(outputs).all():
        return None
    groups = _numbered(ids)
    found = _spread_within(groups, outputs)
    if found is None:
        return None
    shuffler = np.random.default_rng(0)
    others = [_spread_within(groups, shuffler.permutation(outputs)) or 0.0 for _ in range(_SHUFFLES)]
    return float((np.mean(others) - found) / (np.std(others) + 1e-12))


def _spread_within(groups: Array, outputs: Array) -> float | None:
    """The mean squared distance of outputs from the mean of their group; `None` if few groups have several."""
    sizes = np.bincount(groups)
    has_several = sizes > 1
    count = sizes[has_several].sum()
    if has_several.sum() < 2 or count < _FEWEST_PAIRS / 4:
        return None
    means = np.bincount(groups, outputs) / sizes
    return float(np.square(outputs - means[groups])[has_several[groups]].sum() / count)


def _aligned(entry: RecordedCall, ids: Tensor, goals: Tensor, ignore: int) -> TokenAlignment:
    valid = goals != ignore
    count, width = valid.sum().clamp_min(1), goals.shape[1]
    shares = []
    for offset in range(3):
        size = min(width, ids.shape[1] - offset)
        same = (goals[:, :size] == ids[:, offset : offset + size]) & valid[:, :size]
        shares.append(same.sum() / valid[:, :size].sum().clamp_min(1))
    # A model that shifts labels itself may append an ignored one to every row: rows end before it.
    appended = (goals[:, -1] == ignore).all()
    label = torch.where(appended, goals[:, -2], goals[:, -1]).mode().values
    is_label = goals == label
    places = torch.arange(width, device=goals.device)
    is_appended = appended & (places == width - 1)
    lengths = (is_label | is_appended).flip(1).long().cumprod(1).sum(1) - appended.long()
    inner = (places > width - appended.long() - lengths[:, None]) & ~is_appended
    constant = ids[:, :width] == ids[:, -1].mode().values
    padded = (constant & inner).sum() / inner.sum().clamp_min(1)
    tail = (lengths.sum() * (label != ignore)) / count
    elsewhere = (is_label.sum() - lengths.sum()) / is_label.sum().clamp_min(1)
    values = torch.stack([*shares, label.to(tail.dtype), tail, elsewhere, padded]).double()
    some = max(1, MOST_COMPARED // width)
    compared = ids[:some, :width].clone(), goals[:some].clone(), valid[:some].clone()
    return later(partial(_facts, entry.index, entry.site, ids.shape[1]), values, own(lengths), *compared)


def _facts(
    index: int, site: str, positions: int, values: Tensor, lengths: Tensor, ids: Tensor, goals: Tensor, valid: Tensor
) -> TokenAlignment:
    same, following, second, label, tail, elsewhere, padded = values.tolist()
    agreement, shuffled, spread = _agreement(ids, goals, valid)
    return TokenAlignment(
        index=index,
        site=site,
        positions=positions,
        same=same,
        following=following,
        second=second,
        tail_label=int(label),
        tail_share=tail,
        tail_elsewhere=elsewhere,
        tail_lengths=len(set(lengths.tolist())),
        tail_padded=padded,
        agreement=agreement,
        agreement_shuffled=shuffled,
        agreement_spread=spread,
    )


def _agreement(ids: Tensor, goals: Tensor, valid: Tensor) -> tuple[float | None, float | None, float | None]:
    """How often two labels agree whose own ids and those before are the same; the same with shuffled labels, and its
    spread. `None` if there are too few such labels.
    """
    counted = valid[:, 1:].numpy()
    before, own_ids = (_numbered(part.numpy()[counted]) for part in (ids[:, :-1], ids[:, 1:]))
    contexts, labels = _paired(before, own_ids), _numbered(goals[:, 1:].numpy()[counted])
    found = _agreeing(contexts, labels)
    if found is None:
        return None, None, None
    shuffler = np.random.default_rng(0)
    others = [_agreeing(contexts, shuffler.permutation(labels)) or 0.0 for _ in range(_SHUFFLES)]
    return found, float(np.mean(others)), float(np.std(others))


def _numbered(values: Array) -> Array:
    """The place of each value among the different ones."""
    return np.unique(values, return_inverse=True)[1]


def _paired(first: Array, second: Array) -> Array:
    """One number for each pair of numbers; equal pairs have equal numbers."""
    return _numbered(first * (second.max(initial=0) + 1) + second)


def _agreeing(contexts: Array, labels: Array) -> float | None:
    """The share of the pairs with the same context that have the same label; `None` with too few pairs."""
    pairs = _pairs_in(contexts)
    return _pairs_in(_paired(contexts, labels)) / pairs if pairs >= _FEWEST_PAIRS else None


def _pairs_in(numbers: Array) -> int:
    """The number of ordered pairs of equal numbers."""
    counts = np.bincount(numbers)
    return int((counts * (counts - 1)).sum())
