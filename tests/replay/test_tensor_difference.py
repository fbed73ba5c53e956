"""Two tensors that should be the same: how many values differ, where and by how much."""

import math

import torch

from surefoot.replay.tensor_difference import differences


def test_equal_tensors_and_unknown_names_give_nothing():
    then = {"w": torch.tensor([1.0, math.nan]), "gone": torch.ones(1)}
    assert differences(then, {"w": torch.tensor([1.0, math.nan])}) == {}


def test_a_single_bit_is_found_with_its_place():
    then = torch.ones(2, 3)
    now = then.clone()
    now.view(torch.int32)[1, 2] ^= 1
    found = differences({"w": then}, {"w": now})["w"]
    assert (found["values"], found["of"], found["first"], found["bits"]) == (1, 6, [1, 2], 1)
    assert found["recorded"] == 1.0
    assert found["largest"] == abs(float(now[1, 2]) - 1.0)


def test_other_shapes_and_types_are_named():
    found = differences({"w": torch.ones(2)}, {"w": torch.ones(3, dtype=torch.float64)})["w"]
    assert found["shape"] == [[2], [3]]
    assert found["dtype"] == ["torch.float32", "torch.float64"]


def test_complex_values_and_infinities():
    found = differences({"w": torch.tensor([1 + 1j])}, {"w": torch.tensor([1 + 2j])})["w"]
    assert found["largest"] == 1.0
    found = differences({"w": torch.tensor([1.0])}, {"w": torch.tensor([math.inf])})["w"]
    assert found["largest"] == math.inf
