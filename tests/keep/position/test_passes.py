"""One pass over a loader: begun as `iter(loader)` would, and taken up again after the last batch handed out."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from surefoot.core.random_state import read_streams
from surefoot.errors import UsageError
from surefoot.keep.position.passes import FollowedIndices, FollowedSampler, StreamWatch, begin, resume

DATA = TensorDataset(torch.arange(12.0))


def values(batches):
    return [batch[0].tolist() if isinstance(batch, list) else batch for batch in batches]


def draw(current, iterator, count):
    found = []
    for _ in range(count):
        found.append(next(iterator))
        current.count_batch()
    return values(found)


@pytest.mark.parametrize(
    "loader",
    [DataLoader(DATA, batch_size=2, shuffle=True), [10, 20, 30, 40, 50, 60]],
    ids=["map", "list"],
)
def test_a_pass_continues_with_the_batch_after_the_last_one(loader):
    torch.manual_seed(3)
    current, iterator = begin(loader, 0)
    draw(current, iterator, 2)
    saved = current.state_dict(None)
    rest = values(iterator)
    torch.manual_seed(99)
    again, resumed = resume(loader, saved)
    assert values(resumed) == rest
    assert (again.number, again.count) == (0, 2)


def test_beginning_a_pass_draws_what_the_loader_itself_would():
    loader = DataLoader(DATA, batch_size=3, shuffle=True)
    torch.manual_seed(5)
    plainly = values(loader)
    after = read_streams()["torch"]
    torch.manual_seed(5)
    _, iterator = begin(loader, 0)
    assert values(iterator) == plainly
    assert torch.equal(read_streams()["torch"], after)


def test_a_batch_that_raised_counts_once_the_loop_continues_after_it():
    current, iterator = begin([1, 2, 3], 0)
    draw(current, iterator, 1)
    current.failed += 1
    assert current.state_dict(None)["count"] == 1
    current.count_batch()
    assert current.state_dict(None)["count"] == 3


def test_a_loader_with_fewer_batches_than_the_position_is_refused():
    current, iterator = begin([1, 2, 3], 0)
    draw(current, iterator, 3)
    with pytest.raises(
        UsageError, match="the saved position is after batch 3 of the pass, but the loader ends after 1"
    ):
        resume([1], current.state_dict(None))


def test_what_cannot_begin_in_the_middle_is_consumed_and_that_is_logged(caplog):
    current, iterator = begin((value for value in range(5)), 0)
    draw(current, iterator, 2)
    _, resumed = resume((value for value in range(5)), current.state_dict(None))
    assert list(resumed) == [2, 3, 4]
    assert "re-reading 2 batches, because a generator cannot start in the middle" in caplog.text


def test_a_sequence_is_continued_without_a_message(caplog):
    current, iterator = begin(range(5), 0)
    draw(current, iterator, 2)
    _, resumed = resume(range(5), current.state_dict(None))
    assert list(resumed) == [2, 3, 4]
    assert not caplog.text


def test_a_sampler_moves_past_its_first_entries_and_keeps_its_length():
    sampler = FollowedSampler(range(6), skip=2, watch=None)
    assert list(sampler) == [2, 3, 4, 5]
    assert len(sampler) == 6


def test_moving_is_done_once_and_may_be_done_early():
    indices = FollowedIndices(iter(range(4)), skip=2, watch=None)
    indices.move()
    indices.move()
    assert next(indices) == 2


def test_an_order_that_is_too_short_is_refused():
    with pytest.raises(UsageError, match="after batch 5 of the pass, but the loader ends after 2"):
        next(FollowedIndices(iter(range(2)), skip=5, watch=None))


DRAWS = {"random": random.random, "numpy": np.random.random, "torch": lambda: torch.rand(1)}


@pytest.mark.parametrize("stream", DRAWS)
def test_an_order_and_a_loop_that_draw_from_one_stream_in_turns_are_noticed(stream):
    watch = StreamWatch()
    order = iter(lambda: DRAWS[stream](), None)
    for _ in range(3):
        watch.next(order)
        DRAWS[stream]()
    assert watch.shared == {stream}


def test_an_order_with_a_stream_of_its_own_shares_none():
    watch, own = StreamWatch(), random.Random(1)
    for _ in range(3):
        watch.next(iter(own.random, None))
        torch.rand(1)
    assert watch.shared == set()
