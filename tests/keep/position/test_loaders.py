"""What kind a loader is, in what it differs from another, and whether its own state can be saved."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset

from surefoot.errors import UsageError
from surefoot.keep.position.loaders import describe, draws_once, loader_kind, plain, warn_of_differences

DATA = TensorDataset(torch.arange(10.0))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


class Stateful(list):
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class OwnIteration(DataLoader):
    def __iter__(self):
        return iter([1, 2])


class EveryOther(RandomSampler):
    pass


def test_the_kind_says_how_a_pass_is_taken_up_again():
    loaders = [DataLoader(DATA), DataLoader(Stream()), Stateful(), [1, 2], OwnIteration(DATA)]
    assert [loader_kind(each) for each in loaders] == ["map", "stream", "stateful", "iterable", "iterable"]


def test_torchs_own_samplers_draw_once_and_others_may_not():
    assert draws_once(DataLoader(DATA, shuffle=True))
    assert draws_once(DataLoader(DATA, batch_sampler=[[0, 1], [2]]))
    assert not draws_once(DataLoader(DATA, sampler=EveryOther(DATA)))


def test_a_loader_is_described_without_running_the_users_code():
    assert describe(DataLoader(DATA, batch_size=4)) == {
        "kind": "map",
        "type": "DataLoader",
        "length": 3,
        "batch_size": 4,
        "workers": 0,
        "in_order": True,
    }
    assert describe(range(7))["length"] == 7
    assert describe(x for x in [1])["length"] is None


def test_batches_of_another_size_move_past_the_same_number_of_samples(caplog):
    then, now = describe(DataLoader(DATA, batch_size=4)), describe(DataLoader(DATA, batch_size=2))
    assert warn_of_differences(now, then, 2, untracked_workers=False, shared=[]) == 4
    assert "batch_size=2" in caplog.text
    assert "continuing after 4 batches of the new size" in caplog.text


def test_equal_loaders_are_not_worth_a_word_and_shared_streams_are(caplog):
    facts = describe(DataLoader(DATA))
    assert warn_of_differences(facts, facts, 3, untracked_workers=False, shared=[]) == 3
    assert caplog.text == ""
    warn_of_differences(facts, facts, 3, untracked_workers=True, shared=["numpy"])
    assert "use the same random stream (numpy)" in caplog.text
    assert "workers were started before `resume(loader)` was first called" in caplog.text


def test_the_own_state_of_a_loader_is_copied_if_it_is_plain():
    tensor = torch.zeros(2)
    copied = plain({"position": np.int64(3), "rng": [tensor, b"x"], 4: (None, True)}, "state")
    assert copied["position"] == 3
    assert type(copied["position"]) is int
    tensor += 1
    assert copied["rng"][0].tolist() == [0.0, 0.0]
    with pytest.raises(UsageError, match=r"holds a set at state\['seen'\]"):
        plain({"seen": {1}}, "state")
