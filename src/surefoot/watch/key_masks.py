"""Attention masks compared with the token ids of the same step: which keys a mask keeps.

A padding mask that is passed with the wrong polarity keeps exactly the positions of one id, the padding, and ignores
all others. Everything is compared by value, for a part of the rows and queries. Not covered: sequences without ids, and
masks that keep a single key per row, such as the first one.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from surefoot.record.facts import KeyMaskCall
from surefoot.watch.deferred import ABSENT, later

if TYPE_CHECKING:
    from surefoot.watch.call_history import CallHistory
    from surefoot.watch.function_recorder import RecordedCall

MOST_ROWS, MOST_QUERIES, MOST_IDS = 64, 32, 4
"""The numbers of rows and of queries that are compared, and of tensors of ids."""
_MASKED = -1e4
"""Logits below this are masked: with large negative numbers if not with minus infinity."""
_FEWEST_IGNORED = 3
"""The highest and the lowest id that are ignored differ by this much at least: they are no flags."""


def key_masks(history: CallHistory, entry: RecordedCall, mask: Any, is_kept: bool) -> list[KeyMaskCall]:
    """The mask of a call, if it keeps the keys of a single id only.

    The dimensions of `mask` are the rows of the batch, heads and queries if it has them, and the keys. `is_kept` is the
    meaning of True in a boolean mask; other masks are logits, or added to them.
    """
    recorder = history.recorder
    if recorder is None or not isinstance(mask, Tensor) or mask.dim() < 2 or mask.shape[0] < 2 or mask.shape[-1] < 3:
        return []
    ignored, found = _ignored(mask.detach(), is_kept), []
    for other in reversed(recorder.entries):
        ids = other.notes.ids
        if ids is None or ids.dim() != 2 or ids.device != mask.device:
            continue
        if ids.shape != (len(mask), mask.shape[-1]):
            ids = ids.t()
        if ids.shape == (len(mask), mask.shape[-1]):
            facts = partial(KeyMaskCall, **history.place(entry))
            each = later(partial(_if_one_id, facts), _compared(ids[:MOST_ROWS], ignored))
            found += [each] if each is not ABSENT else []
    return found[:MOST_IDS]


def _ignored(mask: Tensor, is_kept: bool) -> Tensor:
    """By row and key, whether all queries of the first head ignore the key."""
    mask = mask[:MOST_ROWS]
    while mask.dim() > 3:
        mask = mask[:, 0]
    if mask.dim() == 3:
        mask = mask[:, :: max(1, math.ceil(mask.shape[1] / MOST_QUERIES))]
    ignored = (mask != is_kept) if mask.dtype is torch.bool else mask < _MASKED
    return ignored.all(1) if ignored.dim() == 3 else ignored


def _compared(ids: Tensor, ignored: Tensor) -> Tensor:
    """The id that is kept, whether only and all its positions are kept, at an end of each row; and numbers of keys."""
    ids = ids.long()
    top = torch.iinfo(torch.int64).max
    kept_id = ids.masked_fill(ignored, top).min()
    kept = ~ignored
    others = torch.where(ignored, ids, ids.masked_fill(kept, top).min())
    is_run = (kept[:, 1:] >= kept[:, :-1]).all(1) | (kept[:, 1:] <= kept[:, :-1]).all(1)
    is_one = (ignored == (ids != kept_id)).all() & is_run.all() & (kept.sum(1).max() > 1)
    is_one &= others.max() - others.min() >= _FEWEST_IGNORED
    return torch.stack([is_one.long(), kept_id, kept.sum(), ignored.sum()])


def _if_one_id(facts: partial[KeyMaskCall], found: Tensor) -> KeyMaskCall:
    is_one, kept_id, kept, ignored = found.tolist()
    return facts(kept_id=kept_id, kept=kept, ignored=ignored) if is_one else cast("KeyMaskCall", ABSENT)
