"""How labels agree where the ids at and before their position are the same."""

from __future__ import annotations

import numpy as np
import torch

from surefoot.watch.token_alignment import _agreement, _crossed, _follow


def text(count: int, length: int) -> torch.Tensor:
    """Rows in which each id has one of two followers."""
    generator = torch.Generator().manual_seed(0)
    following = torch.randint(0, 9, (9, 2), generator=generator)
    rows = [torch.randint(0, 9, (count,), generator=generator)]
    for _ in range(length - 1):
        rows.append(following[rows[-1], torch.randint(0, 2, (count,), generator=generator)])
    return torch.stack(rows, 1)


def test_labels_that_follow_their_ids_agree_more_often_than_shuffled_ones() -> None:
    rows = text(64, 17)
    found, shuffled, spread = _agreement(rows[:, :-1], rows[:, 1:], torch.ones(64, 16, dtype=torch.bool))
    assert found is not None
    assert shuffled is not None
    assert spread is not None
    assert found > shuffled + 10 * spread


def test_labels_of_other_rows_agree_as_often_as_shuffled_ones() -> None:
    rows = text(64, 60)[:, -17:]
    others = rows[torch.randperm(64, generator=torch.Generator().manual_seed(1))]
    found, shuffled, spread = _agreement(rows[:, :-1], others[:, 1:], torch.ones(64, 16, dtype=torch.bool))
    assert found is not None
    assert shuffled is not None
    assert spread is not None
    assert found < shuffled + 4 * spread


def test_labels_that_do_not_count_are_left_out_and_few_labels_say_nothing() -> None:
    rows = text(64, 17)
    valid = torch.zeros(64, 16, dtype=torch.bool)
    assert _agreement(rows[:, :-1], rows[:, 1:], valid) == (None, None, None)


def test_labels_whose_rows_and_columns_are_swapped_are_the_following_ids_only_after_swapping_them() -> None:
    rows = text(12, 17)
    ids, goals = rows[:, :-1], rows[:, 1:]
    outputs = torch.zeros(ids.numel(), 3)
    for given in (ids, ids.t()):
        flat = goals if given is ids else goals.t()
        right = _crossed(given, flat.reshape(-1), outputs)
        wrong = _crossed(given, flat.t().reshape(-1), outputs)
        assert right is not None
        assert wrong is not None
        assert right[0].item() < -0.5
        assert wrong[0].item() > 0.5


def test_outputs_that_depend_on_their_id_follow_the_ids() -> None:
    ids = text(32, 16).reshape(-1)
    outputs = ids + 0.5 * torch.randn(len(ids), generator=torch.Generator().manual_seed(0))
    assert (_follow(ids.numpy(), outputs.numpy()) or 0.0) > 10
    assert abs(_follow(ids.numpy(), outputs.reshape(32, 16).t().reshape(-1).numpy()) or 0.0) < 6
    assert _follow(np.arange(512), outputs.numpy()) is None
