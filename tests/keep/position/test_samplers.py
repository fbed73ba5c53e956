"""Moving past the beginning of an order, and noticing an order that cannot be repeated."""

import random

import numpy as np
import pytest
import torch

from surefoot.errors import UsageError
from surefoot.keep.position.samplers import FollowedIndices, FollowedSampler, StreamWatch


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
