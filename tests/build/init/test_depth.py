"""Activations and gradients keep their scale through depth; the benchmark's own measurements, one seed each."""

import pytest

CASES = [
    "ReLU MLP, 50 layers",
    "GELU MLP, 50 layers",
    "Tanh MLP, 50 layers",
    "SiLU MLP, 50 layers",
    "plain CNN, 50 layers of 256 channels",
    "pre-norm transformer, 24 blocks",
    "the same, embedding tied to head",
    "LSTM, 50 steps",
]


@pytest.mark.parametrize("name", CASES)
def test_scale_is_kept_within_a_factor_of_three_after_init_for(name, script):
    depth = script("benchmarks/init_depth.py")
    activations, gradients = depth.scales(depth.CASES[name], depth.by_init_for, seed=0)
    assert depth.spread(activations) < 3.0
    assert depth.spread(gradients) < 3.0
    assert len(activations) == (24 if "norm" in name or "same" in name else 50)


@pytest.mark.parametrize("name", ["ReLU MLP, 50 layers", "Tanh MLP, 50 layers", "LSTM, 50 steps"])
@pytest.mark.parametrize("init", ["by_default", "by_randn"])
def test_the_same_measurement_sees_pytorchs_default_and_randn_fail(name, init, script):
    depth = script("benchmarks/init_depth.py")
    _, gradients = depth.scales(depth.CASES[name], getattr(depth, init), seed=0)
    assert depth.spread(gradients) > 1e3
