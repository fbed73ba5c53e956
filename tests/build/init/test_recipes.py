import math

import numpy as np
import pytest
import torch
from torch import nn

from surefoot.build import (
    critical_,
    he_normal_,
    lecun_normal_,
    orthogonal_gates_,
    remember_bias_,
    residual_normal_,
    small_normal_,
    xavier_normal_,
)
from surefoot.build.init.fresh import looks_fresh
from surefoot.build.init.gains import GAINS, gain_for

POINTS, WEIGHTS = np.polynomial.hermite_e.hermegauss(200)
WEIGHTS = WEIGHTS / WEIGHTS.sum()


def mean_over_normal(function, variance):
    """E[f(√variance · z)] for standard normal z, by quadrature in float64."""
    return float(WEIGHTS @ function(torch.tensor(math.sqrt(variance) * POINTS)).numpy())


@pytest.mark.parametrize(("name", "activation"), [("gelu", nn.functional.gelu), ("silu", nn.functional.silu)])
def test_critical_constants_are_the_point_where_signal_and_gradient_keep_their_scale(name, activation):
    gain = gain_for(name)

    def slope(z):
        z = z.clone().requires_grad_()
        return torch.autograd.grad(activation(z).sum(), z)[0]

    signal = mean_over_normal(lambda z: activation(z) ** 2, gain.fixed_point)
    gradient = mean_over_normal(lambda z: slope(z) ** 2, gain.fixed_point)
    drift = mean_over_normal(lambda z: activation(z) * slope(z) * z, gain.fixed_point) / gain.fixed_point
    assert gain.bias + gain.weight * signal == pytest.approx(gain.fixed_point, rel=1e-6)
    assert gain.weight * gradient == pytest.approx(1.0, rel=1e-6)
    assert gain.weight * drift == pytest.approx(1.0, rel=1e-6)


def test_the_relu_constant_is_exact_at_any_scale():
    for variance in (0.01, 1.0, 100.0):
        signal = mean_over_normal(lambda z: torch.relu(z) ** 2, variance)
        assert GAINS["relu"].weight * signal == pytest.approx(variance, rel=1e-9)


def test_the_first_critical_layer_reaches_the_fixed_point_from_unit_input():
    torch.manual_seed(0)
    weight, bias = torch.empty(512, 512), torch.empty(512)
    critical_(weight, bias, activation="silu", entry=True)
    assert float((torch.randn(512, 512) @ weight.T + bias).var()) == pytest.approx(14.32, rel=0.1)


@pytest.mark.parametrize(
    ("fill", "std"),
    [
        (he_normal_, (2 / 300) ** 0.5),
        (lambda w: he_normal_(w, slope=1.0), (1 / 300) ** 0.5),
        (xavier_normal_, (2 / 700) ** 0.5),
        (lambda w: xavier_normal_(w, gain=2.0), 2 * (2 / 700) ** 0.5),
        (lecun_normal_, (1 / 300) ** 0.5),
        (small_normal_, (2 / 1500) ** 0.5),
        (lambda w: residual_normal_(w, branches=24), (2 / 1500) ** 0.5 / 24**0.5),
        (lambda w: residual_normal_(w, branches=4, std=0.02), 0.01),
    ],
)
def test_each_recipe_draws_the_deviation_of_its_paper(fill, std):
    torch.manual_seed(0)
    weight = nn.Parameter(torch.empty(400, 300))
    assert fill(weight) is weight
    assert float(weight.detach().std()) == pytest.approx(std, rel=0.01)
    assert weight.requires_grad
    assert weight.grad_fn is None


def test_a_kernel_counts_in_the_fan():
    torch.manual_seed(0)
    assert float(he_normal_(torch.empty(64, 32, 3, 3)).std()) == pytest.approx((2 / 288) ** 0.5, rel=0.02)


def test_gates_that_do_not_divide_the_rows_are_refused():
    with pytest.raises(ValueError, match="4 gates"):
        orthogonal_gates_(torch.empty(10, 3), 4)
    with pytest.raises(ValueError, match="GRU"):
        remember_bias_(torch.empty(10), 1)


def test_a_vector_has_no_fan():
    with pytest.raises(ValueError, match="at least 2 dimensions"):
        he_normal_(torch.empty(4))


def test_branches_below_one_and_unknown_critical_activations_are_refused():
    with pytest.raises(ValueError, match="at least 1"):
        residual_normal_(torch.empty(2, 2), branches=0)
    with pytest.raises(ValueError, match="he_normal_"):
        critical_(torch.empty(2, 2), activation="relu")


def test_default_draws_look_fresh_and_one_adam_step_does_not():
    torch.manual_seed(0)
    for _ in range(200):
        layer = nn.Linear(64, 64)
        assert looks_fresh(layer.weight, ("uniform", 1 / 8))
        assert looks_fresh(layer.bias, ("uniform", 1 / 8))
    layer(torch.randn(8, 64)).square().mean().backward()
    torch.optim.Adam(layer.parameters(), lr=1e-3).step()
    assert not looks_fresh(layer.weight, ("uniform", 1 / 8))


def test_another_distribution_of_the_same_scale_does_not_look_fresh():
    torch.manual_seed(0)
    assert not looks_fresh(torch.randn(64, 64).clamp(-2, 2) / 16, ("uniform", 1 / 8))
    assert looks_fresh(torch.randn(64, 64), ("normal", 1.0))
    assert not looks_fresh(0.9 * torch.randn(64, 64), ("normal", 1.0))
    assert not looks_fresh(torch.full((4,), float("nan")), ("uniform", 1.0))
