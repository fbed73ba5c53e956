"""What loaders carry from one pass to the next is put back when they are met again."""

import torch

from surefoot.keep.position.loader_state import GeneratorState, LoaderState


def drawn(generator):
    return torch.rand(2, generator=generator).tolist()


def test_a_generator_continues_where_it_was_when_the_state_was_saved():
    generator, state = torch.Generator().manual_seed(1), GeneratorState()
    state.begin_pass(0, {"loader": generator}, epochs_done=0)
    drawn(generator)
    saved = state.state_dict()
    expected = drawn(generator)
    fresh = torch.Generator().manual_seed(1)
    GeneratorState(saved).begin_pass(0, {"loader": fresh}, epochs_done=0)
    assert drawn(fresh) == expected


def test_two_loaders_are_distinguished_by_the_passes_that_used_them():
    training, validation, state = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2), GeneratorState()
    for number, generator in enumerate([training, validation, training, validation]):
        state.begin_pass(number, {"loader": generator}, epochs_done=0)
        drawn(generator)
    saved = state.state_dict()
    assert saved["of_pass"].tolist() == [0, 1, 0, 1]
    expected = drawn(validation)
    resumed, other = GeneratorState(saved), torch.Generator()
    resumed.begin_pass(1, {"loader": other}, epochs_done=0)
    assert drawn(other) == expected


def test_what_is_not_met_again_stays_as_it_was_saved():
    generator, state = torch.Generator().manual_seed(1), GeneratorState()
    state.begin_pass(0, {"loader": generator}, epochs_done=0)
    saved = state.state_dict()
    again = GeneratorState(saved)
    again.begin_pass(1, {}, epochs_done=0)  # a pass without a generator
    assert again.state_dict()["saved"] == saved["saved"]
    assert again.state_dict()["of_pass"].tolist() == [0, -1][: len(again.state_dict()["of_pass"])]


def test_the_oldest_of_very_many_are_forgotten():
    entries = LoaderState(None)
    for entry in range(100):
        entries.bind(entry, object())
        entries.note(entry, entry)
    assert sorted(entries.bound) == list(range(36, 100))
