"""Gradients that were changed in place between backward and step are noticed without reading them."""

import torch
from torch import nn

from surefoot.guard.backward import WATCHED, GradientChanges
from surefoot.observe.parameters import named_parameters


def after_backward(layers=2):
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers)))
    model(torch.ones(1, 2)).sum().backward()
    return model, GradientChanges(named_parameters([model]))


def test_clipping_from_outside_is_noticed():
    model, changes = after_backward()
    assert not changes.broken
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    assert changes.broken


def test_reading_and_new_gradients_are_not_changes():
    model, changes = after_backward()
    _ = [parameter.grad.norm() for parameter in model.parameters()]
    model.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    assert not changes.broken


def test_a_few_gradients_are_watched_and_those_that_are_none_are_left_out():
    model, _ = after_backward(layers=4)
    model[0].weight.grad = None
    changes = GradientChanges(named_parameters([model]))
    list(model.parameters())[-1].grad.mul_(2)
    assert not changes.broken
    list(model.parameters())[WATCHED].grad.mul_(2)
    assert changes.broken
