"""Calibration gives each layer's output the second moment that was asked for, and changes weights only."""

import pytest
import torch
from torch import nn

from surefoot.build.init.calibrate import rescale


@torch.no_grad()
def test_every_layer_has_the_second_moment_it_aims_at():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    data = torch.randn(64, 8)
    biases = [model[0].bias.clone(), model[2].bias.clone()]
    rescale(model, data, {model[0].weight: 2.0, model[2].weight: 0.5})
    first = model[0](data)
    assert float(first.square().mean()) == pytest.approx(2.0, rel=0.1)  # the bias correlates with nothing
    assert float((model[2](first.relu()) - model[2].bias).square().mean()) == pytest.approx(
        0.5 - float(model[2].bias.square().mean()), rel=1e-4
    )
    assert torch.equal(model[0].bias, biases[0])
    assert torch.equal(model[2].bias, biases[1])


def test_a_layer_that_gives_zeros_is_left_as_it_is():
    layer = nn.Linear(4, 4, bias=False)
    before = layer.weight.clone()
    rescale(layer, torch.zeros(2, 4), {layer.weight: 1.0})
    assert torch.equal(layer.weight, before)


def test_no_hook_stays_behind_even_if_the_forward_raises():
    layer = nn.Linear(4, 4)
    with pytest.raises(RuntimeError):
        rescale(layer, torch.zeros(2, 5), {layer.weight: 1.0})
    assert not layer._forward_hooks
