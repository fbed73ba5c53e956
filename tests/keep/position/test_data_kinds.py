"""Loaders that keep their own state, and workers that are started from scratch."""

from __future__ import annotations

import functools
import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from surefoot.errors import UsageError
from surefoot.keep.position.data import DataPosition


def interrupted(make, stop: int) -> tuple[list, list]:
    """The rest of an uninterrupted run after `stop` batches, and the rest of one that was taken up again there."""
    random.seed(3)
    torch.manual_seed(3)
    position, whole, state = DataPosition(), [], None
    for batch in position.follow(make()):
        whole.append(batch)
        if len(whole) == stop:
            state = position.state_dict()
    random.seed(4)
    torch.manual_seed(4)
    resumed = DataPosition()
    resumed.load_state_dict(state)
    return whole[stop:], list(resumed.follow(make()))


def test_a_spawned_worker_continues_with_the_random_numbers_of_its_collate_function():
    def make():
        collate = functools.partial(random.choices, k=4)  # in a spawned worker, a generator of its own
        return DataLoader(
            list(range(12)),
            batch_size=4,
            shuffle=True,
            collate_fn=collate,
            num_workers=1,
            multiprocessing_context="spawn",
        )

    expected, got = interrupted(make, 2)
    assert len(expected) == 1
    assert got == expected


@pytest.mark.filterwarnings("ignore:.set_vital. is deprecated:UserWarning")  # torchdata's own
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_with_its_own_state_is_asked_to_go_on(workers, caplog):
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def make():
        return stateful.StatefulDataLoader(
            list(range(12)), batch_size=2, shuffle=True, num_workers=workers, collate_fn=list
        )

    for stop in (1, 4, 6):
        expected, got = interrupted(make, stop)
        assert got == expected
    assert caplog.text == "", "nothing had to be loaded again"


class Odd:
    """A loader whose own state cannot be saved without pickle."""

    def __iter__(self):
        return iter([1, 2, 3])

    def state_dict(self):
        return {"order": [1, {"rows": np.arange(3)}]}

    def load_state_dict(self, state):
        raise AssertionError("never saved, never loaded")


def test_a_state_that_is_not_plain_is_refused_by_name():
    position = DataPosition()
    batches = iter(position.follow(Odd()))
    next(batches)
    with pytest.raises(UsageError, match=r"ndarray at state_dict\(\)\['order'\]\[1\]\['rows'\]"):
        position.state_dict()
