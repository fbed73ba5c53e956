"""Calls of modules are observed while this is open, and without a hook on any module."""

import torch
from torch import nn

from surefoot.watch.first_model_call import FirstModelCall


class Scaled(nn.Module):
    def forward(self, x, *, by=1.0):
        return x * by


def test_every_call_is_reported_with_its_keywords_until_it_is_closed():
    seen = []
    calls = FirstModelCall(lambda module, args, kwargs: seen.append((module, args, dict(kwargs))))
    model, x = Scaled(), torch.ones(2)
    model(x)
    calls.open()
    calls.open()  # once is enough
    try:
        model(x, by=3.0)
        assert not model._forward_pre_hooks
    finally:
        calls.close()
    calls.close()
    model(x)
    assert seen == [(model, (x,), {"by": 3.0})]


def test_arguments_that_it_returns_are_used():
    calls = FirstModelCall(lambda module, args, kwargs: (args[0] + 1,))
    calls.open()
    try:
        assert Scaled()(torch.ones(2), by=2.0).tolist() == [4.0, 4.0]
    finally:
        calls.close()
