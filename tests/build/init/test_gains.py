"""The tabulated gains keep the variance of a signal: checked against the integrals they come from, in float64."""

import pytest
import torch
import torch.nn.functional as F

from surefoot.build.init.gains import GAINS, gain_for, he

ACTIVATIONS = {"gelu": F.gelu, "silu": F.silu}


def mean_under_normal(function):
    """The mean of a function of a standard normal variable, by the trapezoid rule."""
    z = torch.linspace(-12, 12, 200_001, dtype=torch.float64)
    weights = torch.exp(-z.square() / 2) / (2 * torch.pi) ** 0.5
    return float(torch.trapezoid(function(z) * weights, z))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_layer_at_the_fixed_point_stays_there(name):
    gain = GAINS[name]
    second_moment = mean_under_normal(lambda z: ACTIVATIONS[name](gain.fixed_point**0.5 * z).square())
    assert gain.weight * second_moment + gain.bias == pytest.approx(gain.fixed_point, rel=1e-6)


@pytest.mark.parametrize("slope", [0.0, 0.2])
def test_he_keeps_the_second_moment_of_a_leaky_relu_at_any_scale(slope):
    moment = mean_under_normal(lambda z: F.leaky_relu(3.0 * z, slope).square())
    assert he(slope).weight * moment == pytest.approx(9.0, rel=1e-6)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_first_layer_brings_standardised_data_to_the_fixed_point_in_one_go(name):
    gain = GAINS[name]
    first = gain.for_layer(has_bias=True, fed_by_activation=False)
    assert first.weight + first.bias == pytest.approx(gain.fixed_point)
    assert gain.for_layer(has_bias=False, fed_by_activation=False).weight == pytest.approx(gain.fixed_point)


def test_a_scale_free_gain_is_the_same_for_every_layer():
    assert he().for_layer(has_bias=False, fed_by_activation=True) == he()


def test_an_activation_without_an_entry_is_treated_as_relu():
    assert gain_for("mish") == gain_for("relu")
    assert gain_for("leaky_relu", 0.1) == he(0.1)
