"""Random generators are found wherever a loader keeps them, and continue exactly where they were read."""

import random
from functools import partial

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from surefoot.keep.position.generators import (
    find_generators,
    process_generators,
    read_generator,
    read_generators,
    set_generator,
    set_generators,
)

KINDS = {
    "torch": (lambda: torch.Generator().manual_seed(1), lambda g: torch.rand(3, generator=g).tolist()),
    "python": (lambda: random.Random(1), lambda g: [g.random(), g.gauss(0, 1)]),
    "numpy": (lambda: np.random.default_rng(1), lambda g: g.standard_normal(3).tolist()),
    "philox": (lambda: np.random.Generator(np.random.Philox(1)), lambda g: g.random(3).tolist()),
    "twister": (lambda: np.random.Generator(np.random.MT19937(1)), lambda g: g.random(3).tolist()),
    "legacy": (lambda: np.random.RandomState(1), lambda g: g.randn(3).tolist()),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_generator_continues_where_it_was_read(kind):
    make, draw = KINDS[kind]
    generator = make()
    draw(generator)
    state = read_generator(generator)
    expected = draw(generator)
    other = make()
    set_generator(other, state)
    assert draw(other) == expected
    assert read_generator(other) == read_generator(generator)


def test_a_state_of_another_kind_is_refused():
    with pytest.raises(ValueError, match="a Random cannot continue the state of a generator of kind 'torch'"):
        set_generator(random.Random(1), read_generator(torch.Generator()))
    pointing_outside = read_generator(np.random.RandomState(1))
    pointing_outside[2] = pointing_outside[2][:-4]
    with pytest.raises(ValueError, match="points outside itself"):
        set_generator(np.random.RandomState(1), pointing_outside)


class Augmented:
    """A data set with generators in odd places."""

    def __init__(self):
        own = np.random.default_rng(3)
        self.settings = {"crops": [random.Random(2)]}
        self.flip = partial(self._flip, noise=torch.Generator())
        self.closure = lambda: own.random()

    def _flip(self, noise):
        return noise

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.zeros(1)


def test_generators_are_found_in_data_sets_samplers_partials_and_closures():
    shuffling = torch.Generator()
    found = find_generators(DataLoader(Augmented(), shuffle=True, generator=shuffling))
    kinds = sorted(type(each).__name__ for each in found.values())
    assert kinds == ["Generator", "Generator", "Generator", "Random"]
    assert any(each is shuffling for each in found.values())


def test_the_generators_of_the_process_are_not_those_of_a_loader():
    process = {id(each) for each in process_generators().values()}
    assert not process & {
        id(each) for each in find_generators({"a": torch.default_generator, "b": Augmented()}).values()
    }


def test_states_without_a_generator_are_left_alone():
    generators = {"a": random.Random(1)}
    states = read_generators(generators)
    set_generators(generators, states | {"gone": states["a"]})
    assert read_generators(generators) == states
