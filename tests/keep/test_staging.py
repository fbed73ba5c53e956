"""Copies of a state that is still being trained."""

from collections import Counter, OrderedDict
from typing import NamedTuple

import pytest
import torch

from surefoot.keep import staging
from surefoot.keep.staging import bytes_of, map_tensors, stage


class Pair(NamedTuple):
    left: object
    right: object


def state():
    weight = torch.arange(6.0).reshape(2, 3)
    return {
        "models": [OrderedDict(a=weight, tied=weight)],
        0: (torch.ones(2, dtype=torch.bfloat16), "text", None),
        "counter": Counter([1, 1, 2]),
        "pair": Pair(torch.zeros((), dtype=torch.int64), [1, 2]),
        "strided": torch.arange(12.0).reshape(3, 4).t(),
        "empty": torch.empty(0),
    }


def test_a_copy_does_not_follow_what_it_was_taken_from():
    live = state()
    staged = stage(live)
    staged.wait()
    live["models"][0]["a"].fill_(-1)
    live["strided"].fill_(-1)
    live["pair"].right.append(3)
    assert torch.equal(staged.tree["models"][0]["a"], torch.arange(6.0).reshape(2, 3))
    assert torch.equal(staged.tree["strided"], torch.arange(12.0).reshape(3, 4).t())
    assert staged.tree["pair"].right == [1, 2]


def test_containers_keep_their_kind():
    copied = stage(state()).tree
    assert type(copied["models"][0]) is OrderedDict
    assert copied["counter"] == Counter([1, 1, 2])
    assert type(copied["counter"]) is Counter
    assert type(copied["pair"]) is Pair
    assert type(copied[0]) is tuple


def test_tied_tensors_are_copied_once_and_stay_tied():
    copied = stage(state()).tree["models"][0]
    assert copied["a"] is copied["tied"]
    weight = torch.zeros(1000)
    assert bytes_of({"a": weight, "b": weight}) == 4000


def test_memory_of_an_earlier_copy_is_used_again():
    live = state()
    first = stage(live)
    where = first.tree["models"][0]["a"].data_ptr()
    live["models"][0]["a"].fill_(5)
    second = stage(live, into=first)
    assert second.tree["models"][0]["a"].data_ptr() == where
    assert second.tree["models"][0]["a"].eq(5).all()


@pytest.mark.parametrize("change", ["shape", "dtype", "count"])
def test_memory_that_no_longer_fits_is_not_used(change):
    first = stage({"a": torch.zeros(4)})
    other = {
        "shape": {"a": torch.ones(5)},
        "dtype": {"a": torch.ones(4, dtype=torch.float64)},
        "count": {"a": torch.ones(4), "b": torch.ones(4)},
    }[change]
    second = stage(other, into=first)
    assert all(torch.equal(second.tree[key], value) for key, value in other.items())
    assert first.tree["a"].eq(0).all()


def test_a_parameter_comes_back_as_a_plain_tensor():
    parameter = torch.nn.Parameter(torch.ones(3))
    copied = stage([parameter]).tree[0]
    assert not copied.requires_grad
    assert type(copied) is torch.Tensor


def test_map_tensors_leaves_the_rest_as_it_is():
    def function():
        pass

    assert map_tensors({"f": function, "n": 3}, lambda t: None) == {"f": function, "n": 3}


def test_the_state_of_a_module_keeps_its_versions():
    live = torch.nn.BatchNorm1d(3).state_dict()
    copied = stage({"model": live}).tree["model"]
    assert type(copied) is OrderedDict
    assert copied._metadata == live._metadata
    assert list(copied) == list(live)


def test_the_place_may_be_chosen_by_the_size_of_the_state():
    sizes = []
    weight = torch.zeros(1000)
    staged = stage({"a": weight, "tied": weight}, lambda size: sizes.append(size) or "device")
    assert sizes == [4000]
    assert torch.equal(staged.tree["a"], weight)


def test_a_state_that_holds_itself_is_entered_once():
    state = {"w": torch.ones(2)}
    state["again"] = [state, state]
    copied = stage(state).tree
    assert torch.equal(copied["w"], torch.ones(2))
    assert copied["w"] is not state["w"]


def test_what_is_too_large_for_one_block_is_copied_into_several(monkeypatch):
    monkeypatch.setattr(staging, "LARGEST_BLOCK", 5)
    live = [torch.full((size,), float(size)) for size in (2, 3, 1, 9, 0, 4)]
    staged = stage(live)
    assert all(map(torch.equal, staged.tree, live))
    live[3].fill_(-1)
    assert torch.equal(stage(live, into=staged).tree[3], live[3])
    assert len({copy.untyped_storage().data_ptr() for copy in staged.tree}) > 1


def test_new_tensors_and_replaced_ones_are_noticed():
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    earlier = stage(optimizer.state_dict())
    loaded = {"state": {}, "param_groups": optimizer.state_dict()["param_groups"]}
    for number, state in optimizer.state_dict()["state"].items():
        loaded["state"][number] = {key: value + 1 for key, value in state.items()}
    optimizer.load_state_dict(loaded)
    again = stage(optimizer.state_dict(), into=earlier).tree
    for number, state in loaded["state"].items():
        assert all(torch.equal(again["state"][number][key], value) for key, value in state.items())
