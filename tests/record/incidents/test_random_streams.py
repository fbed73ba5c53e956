"""The random streams are noted at every step for a few microseconds, and give what the slow way gives."""

import random

import numpy as np
import pytest
import torch

from surefoot.core.nested import equal
from surefoot.core.random_state import read_streams, set_streams
from surefoot.record.incidents.random_streams import QuickStreams


def draw():
    return random.random(), np.random.rand(), torch.rand(1).item()


def test_a_note_is_what_the_public_functions_read():
    streams = QuickStreams()
    assert streams.quick
    for _ in range(3):
        draw()
        note, public = streams.note(), read_streams()
        assert equal(note.full(), public)


def test_a_note_gives_the_streams_as_they_were_then():
    streams = QuickStreams()
    note = streams.note()
    expected = [draw() for _ in range(700)]  # beyond one block of the generators
    after = read_streams()
    set_streams(note.full())
    assert [draw() for _ in range(700)] == expected
    assert equal(read_streams(), after)


@pytest.mark.parametrize("seed", [random.seed, np.random.seed, torch.manual_seed])
def test_a_loop_that_seeds_at_every_step_gets_a_note_of_every_seed(seed):
    streams = QuickStreams()
    for number in range(3):
        seed(number)
        assert equal(streams.note().full(), read_streams())
        draw()


def test_without_a_graph_under_way_a_note_is_taken():
    streams = QuickStreams([torch.device("cpu")])
    assert streams.note_or(None) is not None
