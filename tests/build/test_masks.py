import pytest
import torch

from surefoot.build import find_fully_masked, mask_fill_value, masked_softmax

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def rows():
    keep = torch.tensor([[True, False, True], [False, False, False], [True, True, True]])
    scores = torch.tensor([[1.0, 50.0, 2.0], [3.0, 4.0, 5.0], [0.0, 1.0, 2.0]])
    return scores, keep


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_fully_masked_row_gives_zeros_and_a_finite_gradient(dtype):
    scores, keep = rows()
    scores = scores.to(dtype).requires_grad_()
    weights = masked_softmax(scores, keep)
    (weights * torch.randn(3, 3).to(dtype)).sum().backward()
    assert weights.dtype == dtype
    assert torch.equal(weights[1], torch.zeros(3, dtype=dtype))
    assert bool(scores.grad.isfinite().all())
    assert torch.equal(scores.grad[1], torch.zeros(3, dtype=dtype))


def test_the_naive_way_makes_nan_in_the_gradient():
    scores, keep = rows()
    scores.requires_grad_()
    additive = torch.zeros(3, 3).masked_fill(~keep, float("-inf"))
    weights = torch.softmax(scores + additive, -1)
    weights[[0, 2]].sum().backward()  # the broken row is thrown away, and still
    assert bool(scores.grad[1].isnan().all())


def test_kept_entries_equal_a_float64_softmax_over_them_alone():
    scores, keep = rows()
    weights = masked_softmax(scores, keep)
    kept = scores[0, keep[0]].double()
    torch.testing.assert_close(weights[0, keep[0]].double(), kept.exp() / kept.exp().sum(), atol=1e-7, rtol=1e-6)
    torch.testing.assert_close(weights[2], scores[2].softmax(-1))


def test_garbage_in_masked_places_reaches_neither_value_nor_gradient():
    scores, keep = rows()
    scores[~keep] = float("nan")
    scores.requires_grad_()
    weights = masked_softmax(scores, keep)
    weights.square().sum().backward()
    assert bool(weights.isfinite().all())
    assert bool(scores.grad.isfinite().all())


def test_a_nan_in_a_kept_place_is_not_hidden():
    scores, keep = rows()
    scores[0, 0] = float("nan")
    assert bool(masked_softmax(scores, keep)[0].isnan().any())


def test_scores_below_the_fill_value_still_win_over_masked_ones():
    scores = torch.tensor([[-60_000.0, -60_001.0, 0.0]], dtype=torch.float16)
    weights = masked_softmax(scores, torch.tensor([[True, True, False]]))
    assert float(weights[0, :2].sum()) == pytest.approx(1.0, abs=1e-3)


def test_a_row_already_filled_with_minus_infinity_counts_as_masked():
    scores = torch.full((1, 3), float("-inf"), requires_grad=True)
    weights = masked_softmax(scores, torch.ones(1, 3, dtype=torch.bool))
    weights.sum().backward()
    assert torch.equal(weights, torch.zeros(1, 3))
    assert bool(scores.grad.isfinite().all())


def test_a_mask_broadcasts_over_heads_and_any_axis():
    scores = torch.randn(2, 4, 5, 6)
    keep = torch.rand(2, 1, 1, 6) > 0.3
    torch.testing.assert_close(
        masked_softmax(scores, keep), masked_softmax(scores.movedim(-1, 1), keep.movedim(-1, 1), dim=1).movedim(1, -1)
    )


def test_the_gradient_matches_finite_differences():
    scores, keep = rows()
    keep[1, 0] = True
    assert torch.autograd.gradcheck(lambda s: masked_softmax(s, keep), scores.double().requires_grad_())


def test_a_mask_that_is_not_boolean_is_refused():
    with pytest.raises(TypeError, match="boolean"):
        masked_softmax(torch.zeros(2, 2), torch.zeros(2, 2))


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_fill_value_survives_addition_to_any_plausible_score(dtype):
    fill = torch.tensor(mask_fill_value(dtype), dtype=dtype)
    scores = torch.tensor([-1e4, 0.0, 1e4], dtype=dtype)
    assert bool((scores + fill).isfinite().all())
    assert bool((fill + scores).softmax(-1).isfinite().all())
    assert float((torch.stack([fill, torch.zeros((), dtype=dtype)])).softmax(-1)[0]) == 0.0


def test_the_fill_value_of_an_integer_type_is_refused():
    with pytest.raises(TypeError, match="floating"):
        mask_fill_value(torch.int64)


def test_fully_masked_rows_are_found_in_boolean_and_additive_masks():
    _, keep = rows()
    additive = torch.zeros(3, 3).masked_fill(~keep, float("-inf"))
    filled = torch.zeros(3, 3, dtype=torch.float16).masked_fill(~keep, torch.finfo(torch.float16).min)
    for mask in (keep, additive, filled):
        assert find_fully_masked(mask).tolist() == [[1]]
    assert find_fully_masked(keep, dim=0).tolist() == []


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("value", [-1e4, -3e4, float("-inf")])
def test_fully_masked_rows_are_found_under_every_common_fill(dtype, value):
    _, keep = rows()
    assert find_fully_masked(torch.zeros(3, 3, dtype=dtype).masked_fill(~keep, value)).tolist() == [[1]]
    assert find_fully_masked(torch.zeros(3, 3).masked_fill(~keep, -1e9)).tolist() == [[1]]


def test_an_integer_mask_is_refused_because_its_meaning_is_open():
    with pytest.raises(TypeError, match="boolean"):
        find_fully_masked(torch.ones(2, 3, dtype=torch.int64))


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: masked_softmax([[0.0]], torch.ones(1, 1, dtype=torch.bool)), "`scores`"),
        (lambda: masked_softmax(torch.zeros(1, 1), [[True]]), "`keep`"),
        (lambda: find_fully_masked([[True]]), "`mask`"),
    ],
)
def test_what_is_no_tensor_is_refused_by_name(call, name):
    with pytest.raises(TypeError, match=f"{name} must be a tensor; got"):
        call()
