import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from surefoot.build import ConvGroupNorm, PreNormMLP, ScaledResidual, groups_for


def test_a_pre_norm_block_adds_to_a_stream_it_does_not_touch():
    block = PreNormMLP(8)
    nn.init.zeros_(block.mlp[2].weight), nn.init.zeros_(block.mlp[2].bias)
    x = torch.randn(2, 3, 8) * 100
    assert torch.equal(block(x), x)


def test_a_pre_norm_block_sees_the_same_input_at_any_scale():
    block = PreNormMLP(8)
    x = torch.randn(4, 8)
    torch.testing.assert_close(block(1000 * x) - 1000 * x, block(x) - x, atol=1e-3, rtol=1e-3)


@given(channels=st.integers(1, 512), most=st.integers(1, 64))
def test_groups_always_divide_the_channels_and_never_hold_one_alone(channels, most):
    groups = groups_for(channels, most)
    assert channels % groups == 0
    assert groups <= most
    assert channels == 1 or channels // groups >= 2


@pytest.mark.parametrize(("channels", "groups"), [(64, 8), (12, 6), (10, 5), (8, 4), (7, 1), (1, 1), (36, 6)])
def test_channels_that_eight_does_not_divide_get_fewer_groups(channels, groups):
    assert groups_for(channels) == groups
    assert ConvGroupNorm(3, channels)(torch.randn(2, 3, 5, 5)).shape == (2, channels, 5, 5)


def test_one_image_gives_the_same_alone_as_in_a_batch():
    block = ConvGroupNorm(3, 10).train()
    images = torch.randn(4, 3, 6, 6)
    torch.testing.assert_close(block(images)[:1], block(images[:1]))


def test_a_constant_scaled_residual_has_no_parameters_of_its_own():
    block = ScaledResidual(nn.Linear(4, 4), 0.1)
    x = torch.randn(2, 4)
    torch.testing.assert_close(block(x), x + 0.1 * block.branch(x))
    assert {name for name, _ in block.named_parameters()} == {"branch.weight", "branch.bias"}


def test_a_learnable_scale_starts_at_its_constant_learns_and_fits_images():
    x = torch.randn(2, 4, 5, 5)
    block = ScaledResidual(nn.Conv2d(4, 4, 1), 1e-4, learnable_features=4, feature_axis=1)
    torch.testing.assert_close(block(x), x + 1e-4 * block.branch(x))
    block(x).square().sum().backward()
    assert block.gain.shape == (4,)
    assert bool((block.gain.grad != 0).all())


def test_a_branch_that_changes_the_shape_is_refused():
    with pytest.raises(ValueError, match=r"\(2, 5\) from \(2, 4\)"):
        ScaledResidual(nn.Linear(4, 5), 1.0)(torch.randn(2, 4))


@pytest.mark.parametrize("block", [PreNormMLP(8), ScaledResidual(nn.Linear(8, 8), 0.1, learnable_features=8)])
def test_blocks_save_and_load(block):
    other = (
        type(block)(8) if isinstance(block, PreNormMLP) else ScaledResidual(nn.Linear(8, 8), 0.5, learnable_features=8)
    )
    other.load_state_dict(block.state_dict())
    x = torch.randn(2, 8)
    assert torch.equal(block(x), other(x))
