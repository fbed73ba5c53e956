"""The random streams: read, and put back."""

import random

import numpy as np
import pytest
import torch

from surefoot.core.random_state import read_streams, set_streams


def draw():
    return (
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
        torch.rand(3).tolist(),
    )


def test_every_stream_continues_where_it_was_read():
    draw()
    state = read_streams()
    first = draw()
    draw()
    set_streams(state)
    assert draw() == first


def test_reading_draws_nothing():
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = draw()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    read_streams()
    assert draw() == expected


@pytest.mark.parametrize("broken", ["position", "keys", "words"])
def test_a_state_that_is_none_is_refused_and_changes_nothing(broken):
    state = read_streams()
    expected = draw()
    set_streams(state)
    if broken == "position":
        state["numpy"]["position"] = 10**6
    elif broken == "keys":
        state["numpy"]["keys"] = torch.zeros(3, dtype=torch.int64)
    else:
        state["python"]["words"] = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match="stream"):
        set_streams(state)
    assert draw() == expected
