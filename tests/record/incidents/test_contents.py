"""The fingerprint of a tensor is the same for the same values, wherever and however they lie."""

import math

import torch

from surefoot.record.incidents.contents import plain_values, print_of


def test_layout_makes_no_difference_and_one_bit_does():
    values = torch.randn(3, 4)
    assert print_of(values) == print_of(values.t().contiguous().t())
    assert print_of(values) == print_of(values.clone().requires_grad_())
    other = values.clone()
    other[0, 0] = torch.nextafter(other[0, 0], torch.tensor(math.inf))
    assert print_of(values)["sha256"] != print_of(other)["sha256"]


def test_shape_and_dtype_are_part_of_it():
    values = torch.zeros(4)
    prints = [
        print_of(each)["sha256"] for each in (values, values.reshape(2, 2), values.double(), values.to(torch.int32))
    ]
    assert len(set(prints)) == 4


def test_every_nan_is_the_same_nan():
    odd = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert print_of(odd) == print_of(torch.tensor([math.nan]))


def test_norm_and_broken_values_are_counted():
    found = print_of(torch.tensor([3.0, 4.0, math.nan, math.inf]))
    assert (found["norm"], found["nonfinite"]) == (5.0, 2)
    assert found["shape"] == [4]
    assert "norm" not in print_of(torch.tensor([1, 2]))
    assert print_of(torch.zeros(0))["norm"] == 0.0


def test_sparse_and_conjugated_tensors_are_read_as_their_values():
    sparse = torch.tensor([[0.0, 2.0]]).to_sparse()
    assert plain_values(sparse).tolist() == [[0.0, 2.0]]
    assert print_of(torch.tensor([1 + 2j]).conj()) == print_of(torch.tensor([1 - 2j]))
