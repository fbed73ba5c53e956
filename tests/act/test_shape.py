import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import surefoot as sf
from streams import INF, NAN, with_gradient
from surefoot.act.shape import unit_norm

SHAPES = [(), (5,), (4, 3), (4, 3, 3, 3), (2, 3, 4)]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)


def rounding(dtype):
    return max(2 * torch.finfo(dtype).eps, 1e-6)


# ---- ClipByValue ----------------------------------------------------------------------------------------------------


@every_dtype
@every_shape
def test_every_entry_is_clamped_by_itself(shape, dtype):
    torch.manual_seed(0)
    gradient = (10 * torch.randn(shape)).to(dtype)
    named = with_gradient(gradient)
    sf.ClipByValue(2.0).shape([named])
    assert named.parameter.grad.dtype == dtype
    np.testing.assert_array_equal(named.parameter.grad.double(), np.clip(gradient.double().numpy(), -2.0, 2.0))


def test_clipping_by_value_changes_the_direction_and_says_so():
    named = with_gradient(torch.tensor([100.0, 1.0]))
    sf.ClipByValue(1.0).shape([named])
    assert named.parameter.grad.tolist() == [1.0, 1.0]
    assert "changes the direction" in sf.ClipByValue.__doc__


def test_clamping_does_not_hide_a_nan():
    named = with_gradient(torch.tensor([NAN, 5.0]))
    sf.ClipByValue(1.0).shape([named])
    assert named.parameter.grad[0].isnan()
    assert named.parameter.grad[1] == 1.0


def test_the_values_of_a_sparse_gradient_are_clamped():
    embedding = torch.nn.Embedding(10, 2, sparse=True)
    (embedding(torch.tensor([1, 4])).sum() * 7).backward()
    embedding.weight.grad = embedding.weight.grad.coalesce()
    sf.ClipByValue(1.0).shape([("weight", embedding.weight)])
    dense = embedding.weight.grad.to_dense()
    assert dense.sum() == 4.0
    assert dense.max() == 1.0


def sparse_and_dense(ids):
    """Two embeddings with the same weights and gradient, one of them sparse, with entries that add up."""
    torch.manual_seed(0)
    sparse, dense = (torch.nn.Embedding(10, 3, sparse=kind) for kind in (True, False))
    dense.load_state_dict(sparse.state_dict())
    for embedding in (sparse, dense):
        (embedding(torch.tensor(ids)) * torch.tensor([1.0, 20.0, -3.0])).sum().backward()
    return sparse.weight, dense.weight


@pytest.mark.parametrize("shaper", [sf.AdaptiveUnitClip(), sf.CentralizeGradients()], ids=repr)
def test_sparse_gradients_are_shaped_row_by_row_as_dense_ones_are(shaper):
    sparse, dense = sparse_and_dense([1, 4, 4, 7])
    before = dense.grad.clone()
    shaper.shape([("sparse", sparse), ("dense", dense)])
    assert sparse.grad.is_sparse
    torch.testing.assert_close(sparse.grad.to_dense(), dense.grad)
    assert not torch.equal(dense.grad, before)


@pytest.mark.parametrize("shaper", [sf.AdaptiveUnitClip(), sf.CentralizeGradients()], ids=repr)
def test_a_gradient_without_units_is_refused_by_name(shaper):
    parameter = torch.nn.Parameter(torch.ones(3, 3))
    parameter.grad = torch.eye(3).to_sparse()
    with pytest.raises(sf.UsageError, match=r"gradient of rows is of layout torch.sparse_coo.*make its gradient dense"):
        shaper.shape([("rows", parameter)])


# ---- AdaptiveUnitClip -----------------------------------------------------------------------------------------------


def agc(weight, gradient, factor, eps):
    """Brock et al., 2021, equation 3, in float64: unit by unit, and only what exceeds the ratio is changed."""
    weight, gradient = (np.atleast_1d(array.double().numpy()) for array in (weight, gradient))
    units = [slice(None)] if weight.ndim == 1 else list(range(len(weight)))
    clipped = gradient.copy()
    for unit in units:
        limit = factor * max(np.linalg.norm(weight[unit]), eps)
        norm = np.linalg.norm(gradient[unit])
        if norm > limit:
            clipped[unit] = gradient[unit] * limit / norm
    return clipped


@every_dtype
@every_shape
@pytest.mark.parametrize("scale", [1e-4, 1e-2, 1.0, 100.0])
def test_agc_is_its_formula(shape, dtype, scale):
    torch.manual_seed(1)
    weight, gradient = torch.randn(shape).to(dtype), (scale * torch.randn(shape)).to(dtype)
    named = with_gradient(gradient, weight)
    sf.AdaptiveUnitClip(0.05).shape([named])
    expected = agc(weight, gradient, 0.05, 1e-3).reshape(shape)
    np.testing.assert_allclose(named.parameter.grad.double(), expected, rtol=rounding(dtype), atol=1e-7)


def test_agc_clips_each_unit_not_the_tensor():
    weight = torch.tensor([[1.0, 0.0], [10.0, 0.0]])
    gradient = torch.tensor([[3.0, 4.0], [0.03, 0.04]])
    named = with_gradient(gradient, weight)
    sf.AdaptiveUnitClip(0.01).shape([named])
    np.testing.assert_allclose(named.parameter.grad[0], [0.006, 0.008], rtol=1e-6)
    assert torch.equal(named.parameter.grad[1], gradient[1])


def test_a_filter_of_a_convolution_is_one_unit():
    norm = unit_norm(torch.ones(4, 3, 2, 2))
    assert norm.shape == (4, 1, 1, 1)
    np.testing.assert_allclose(norm.flatten(), np.sqrt(12.0), rtol=1e-6)


def test_weights_that_start_at_zero_can_leave_it():
    named = with_gradient(torch.full((2, 4), 5.0), torch.zeros(2, 4))
    sf.AdaptiveUnitClip(factor=0.01, eps=1e-3).shape([named])
    np.testing.assert_allclose(unit_norm(named.parameter.grad).flatten(), 1e-5, rtol=1e-5)


@given(st.floats(1e-12, 1.0), st.floats(1e-9, 1e-2))
def test_a_unit_below_its_limit_is_not_changed_however_small_the_limit(share, factor):
    weight = torch.ones(1, 4)
    gradient = torch.full((1, 4), factor * share * 0.99, dtype=torch.float64)
    named = with_gradient(gradient, weight.double())
    sf.AdaptiveUnitClip(factor).shape([named])
    assert torch.equal(named.parameter.grad, gradient)


def test_biases_and_gains_can_be_left_out():
    bias, matrix = with_gradient(torch.full((3,), 9.0)), with_gradient(torch.full((3, 3), 9.0))
    sf.AdaptiveUnitClip(vectors=False).shape([bias, matrix])
    assert torch.equal(bias.parameter.grad, torch.full((3,), 9.0))
    assert matrix.parameter.grad.max() < 1e-4


def test_the_head_can_be_left_out_by_name():
    head, body = (with_gradient(torch.full((3, 3), 9.0), name=name) for name in ("head.weight", "body.head_norm"))
    sf.AdaptiveUnitClip(exclude=("head.*",)).shape([head, body])
    assert torch.equal(head.parameter.grad, torch.full((3, 3), 9.0))
    assert body.parameter.grad.max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("value", [1e20, 1e37])
def test_an_explosion_whose_squares_overflow_is_clipped_like_any_other(value, dtype):
    weight = torch.ones(2, 4, dtype=dtype)
    gradient = torch.tensor([[value] * 4, [1e-3] * 4], dtype=dtype)
    named = with_gradient(gradient, weight)
    sf.AdaptiveUnitClip(0.01).shape([named])
    np.testing.assert_allclose(
        named.parameter.grad.double(), agc(weight, gradient, 0.01, 1e-3), rtol=rounding(dtype), atol=1e-7
    )


@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_broken_unit_does_not_break_the_others(bad):
    named = with_gradient(torch.tensor([[bad, 1.0], [3.0, 4.0]]), torch.ones(2, 2))
    sf.AdaptiveUnitClip(0.01).shape([named])
    assert not named.parameter.grad[0, 0].isfinite()
    assert named.parameter.grad[0, 1] == 1.0
    np.testing.assert_allclose(unit_norm(named.parameter.grad)[1].item(), 0.01 * np.sqrt(2), rtol=1e-5)


# ---- CentralizeGradients --------------------------------------------------------------------------------------------


@every_dtype
@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 3, 3), (2, 3, 4)], ids=str)
def test_centralisation_is_its_formula(shape, dtype):
    torch.manual_seed(2)
    gradient = (torch.randn(shape) + 3).to(dtype)
    named = with_gradient(gradient)
    sf.CentralizeGradients().shape([named])
    whole = gradient.double().numpy()
    expected = whole - whole.mean(axis=tuple(range(1, whole.ndim)), keepdims=True)
    found = named.parameter.grad.double().numpy()
    np.testing.assert_allclose(found, expected, atol=8 * rounding(dtype))
    np.testing.assert_allclose(found.reshape(shape[0], -1).mean(1), 0, atol=8 * rounding(dtype))


@pytest.mark.parametrize("shape", [(), (5,)], ids=str)
def test_only_tensors_of_rank_above_1_are_centralised(shape):
    gradient = torch.full(shape, 3.0)
    named = with_gradient(gradient)
    sf.CentralizeGradients().shape([named])
    assert torch.equal(named.parameter.grad, gradient)


# ---- all of them ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shaper", [sf.ClipByValue(1.0), sf.AdaptiveUnitClip(), sf.CentralizeGradients()], ids=lambda s: type(s).__name__
)
def test_a_parameter_without_a_gradient_is_passed_over(shaper):
    frozen, named = ("frozen", torch.nn.Parameter(torch.ones(2, 2))), with_gradient(torch.tensor([[5.0, 7.0]]))
    shaper.shape([frozen, named])
    assert frozen[1].grad is None
    assert named.parameter.grad.max() <= 1.0
