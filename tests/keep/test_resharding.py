"""A state that was saved in shards, as one process needs it."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import nn

from surefoot.errors import CheckpointError
from surefoot.keep.checkpoint.shards import SavedShard, SavedShards, ShardLayout, cut
from surefoot.keep.resharding import placed_like, placed_model, placed_optimizer


def in_rows(value: torch.Tensor, own: bool = False) -> SavedShards:
    """A matrix that two processes saved, each its half of the rows; with `own`, this one is the second of them."""
    rows, columns = value.shape
    halves = [(0, rows // 2), (rows // 2, rows)]
    layouts = [ShardLayout((rows, columns), ((half,), ((0, columns),))) for half in halves]
    parts = [SavedShard(rank, each, cut(value, each).__getitem__) for rank, each in enumerate(layouts)]
    return SavedShards("value", (rows, columns), value.dtype, lambda: parts, parts[1] if own else None)


VALUE = torch.arange(12.0).view(4, 3)


def test_a_process_that_holds_the_whole_tensor_gets_the_whole_tensor():
    assert torch.equal(placed_like(in_rows(VALUE), torch.zeros(4, 3)), VALUE)


def test_without_a_tensor_to_load_into_a_rank_of_the_same_run_gets_its_own_part():
    assert torch.equal(placed_like(in_rows(VALUE, own=True), None), VALUE[2:])
    assert torch.equal(placed_like(in_rows(VALUE), None), VALUE)


def test_what_does_not_fit_is_left_for_the_comparison_of_shapes():
    assert torch.equal(placed_like(in_rows(VALUE), torch.zeros(5, 3)), VALUE)


def test_lists_and_dictionaries_are_followed_and_other_values_stay():
    saved = {"layers": [in_rows(VALUE), 3], "name": "a", "extra": (in_rows(VALUE),)}
    placed = placed_like(saved, {"layers": [torch.zeros(4, 3), 0], "name": "b"})
    assert torch.equal(placed["layers"][0], VALUE)
    assert torch.equal(placed["extra"][0], VALUE)
    assert (placed["layers"][1], placed["name"]) == (3, "a")


def test_the_state_of_a_model_keeps_its_class_and_its_versions():
    model = nn.Linear(3, 4, bias=False)
    saved = OrderedDict(weight=in_rows(VALUE))
    saved._metadata = {"": {"version": 1}}
    placed = placed_model(model, saved)
    assert type(placed) is OrderedDict
    assert placed._metadata == {"": {"version": 1}}
    model.load_state_dict(placed)
    assert torch.equal(model.weight, VALUE)


def test_moments_are_divided_like_their_parameter():
    parameter = nn.Parameter(torch.zeros(4, 3))
    optimizer = torch.optim.Adam([parameter])
    groups = optimizer.state_dict()["param_groups"]
    saved = {"state": {0: {"step": torch.tensor(5.0), "exp_avg": in_rows(VALUE)}}, "param_groups": groups}
    placed = placed_optimizer(optimizer, saved)
    assert torch.equal(placed["state"][0]["exp_avg"], VALUE)
    assert placed["state"][0]["step"] == 5.0
    assert placed["param_groups"] == groups


def test_a_moment_with_shards_of_its_own_is_refused_with_both_shapes():
    optimizer = torch.optim.Adam([nn.Parameter(torch.zeros(6, 3))])
    groups = optimizer.state_dict()["param_groups"]
    with pytest.raises(CheckpointError, match=r"'exp_avg' of shape \(4, 3\) for a parameter of shape \(6, 3\)"):
        placed_optimizer(optimizer, {"state": {0: {"exp_avg": in_rows(VALUE)}}, "param_groups": groups})
