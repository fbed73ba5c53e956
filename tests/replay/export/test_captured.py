"""A value is known by its place and how often that was written to."""

import torch

from recorded_calls import captured
from surefoot.replay.export.captured import keep_values, key_of, plain_copy


def test_a_write_makes_another_value():
    x = torch.zeros(3)
    before = key_of(x)
    assert key_of(x.view(3)) == before
    assert key_of(x[:2]) != before
    x.add_(1)
    assert key_of(x) != before


def test_values_that_were_overwritten_are_not_kept():
    x, y = torch.ones(2), torch.ones(2)

    def step():
        z = x + y
        y.zero_()
        return z

    calls = captured(step).calls
    kept = keep_values(calls[:1])
    assert key_of(x) in kept
    assert calls[0].inputs.keys() - kept.keys()
    assert captured(step).bad is not None


def test_an_output_is_the_input_of_the_next_call():
    calls = captured(lambda: torch.ones(2).exp().log()).calls
    assert calls[-2].outputs.keys() == calls[-1].inputs.keys()


def test_copies_have_no_graph_no_view_and_no_subclass():
    x = torch.nn.Parameter(torch.ones(2, 2)).T
    copy = plain_copy(x)
    assert type(copy) is torch.Tensor
    assert not copy.requires_grad
    assert copy.is_contiguous()
    assert not plain_copy(torch.tensor([1j]).conj()).is_conj()
    assert key_of(torch.ones(2).to_sparse()).storage[0] == "odd"
