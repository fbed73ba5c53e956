"""Fresh weights are recognised as fresh; loaded, trained and scaled ones are not."""

import torch
from torch import nn

from surefoot.build.init.fresh import Freshness, freshness, looks_fresh


def bound(layer):
    return ("uniform", 1.0 / layer.in_features**0.5)


def test_a_linear_layer_as_torch_made_it_is_fresh():
    layer = nn.Linear(64, 64)
    assert freshness(layer.weight, (bound(layer),)) is Freshness.FRESH


def test_one_step_of_adam_is_seen():
    layer = nn.Linear(64, 64)
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
    layer(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    assert freshness(layer.weight, (bound(layer),)) is Freshness.SET


def test_another_scale_and_another_shape_are_seen():
    values = torch.empty(64, 64).uniform_(-1, 1)
    assert looks_fresh(values, ("uniform", 1.0))
    assert not looks_fresh(values * 0.9, ("uniform", 1.0))
    assert not looks_fresh(torch.randn(64, 64).clamp(-1, 1), ("uniform", 1.0))
    assert not looks_fresh(torch.full((64, 64), float("nan")), ("uniform", 1.0))


def test_few_values_and_a_normal_distribution_leave_doubt():
    assert freshness(torch.empty(10).uniform_(-1, 1), (("uniform", 1.0),)) is Freshness.UNSURE
    assert freshness(torch.randn(4000), (("normal", 1.0),)) is Freshness.UNSURE


def test_a_constant_is_fresh_only_if_every_value_is_that_constant():
    assert freshness(torch.ones(8), (("constant", 1.0),)) is Freshness.FRESH
    assert freshness(torch.tensor([1.0, 1.0, 1.1]), (("constant", 1.0),)) is Freshness.SET


def test_of_a_module_the_most_certain_parameter_decides():
    assert Freshness.UNSURE.joined(Freshness.SET) is Freshness.SET
    assert Freshness.FRESH.joined(Freshness.UNSURE) is Freshness.FRESH
    assert Freshness.UNSURE.joined(None) is Freshness.UNSURE
