"""Numbers about a tensor: over the finite values, of any dtype, without a random number drawn."""

import math

import pytest
import torch

from surefoot.watch.tensor_summary import (
    SAMPLE,
    as_distribution,
    describe,
    fingerprints,
    finite_or_none,
    label_counts,
    rows_of,
    sampled,
)

NAN, INF = math.nan, math.inf


def test_moments_are_of_the_finite_values_and_the_others_are_counted():
    found = describe(torch.tensor([1.0, NAN, 3.0, INF, 0.0, -INF]))
    assert (found.nonfinite, found.min, found.max) == (3, 0.0, 3.0)
    assert found.mean == pytest.approx(4 / 3)
    assert found.std == pytest.approx(math.sqrt(14 / 9))


def test_without_a_finite_value_there_are_no_moments():
    found = describe(torch.full((4,), NAN))
    assert (found.nonfinite, found.min, found.mean) == (4, None, None)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.bool])
def test_integers_have_a_range_of_integers(dtype):
    found = describe(torch.tensor([0, 1, 1], dtype=dtype))
    assert (found.min, found.max, type(found.max), found.mean) == (0, 1, int, None)
    assert found.dtype == str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("tensor", [torch.empty(0, 3), torch.ones(2, dtype=torch.complex64), torch.eye(2).to_sparse()])
def test_what_has_no_plain_values_is_described_by_shape_alone(tensor):
    found = describe(tensor)
    assert (found.shape, found.min, found.nonfinite) == (list(tensor.shape), None, None)


def test_a_half_precision_tensor_does_not_overflow_in_its_own_mean():
    found = describe(torch.full((64,), 60_000.0, dtype=torch.float16))
    assert (found.mean, found.std, found.nonfinite) == (pytest.approx(60_000, rel=1e-3), 0.0, 0)


def test_a_large_tensor_is_thinned_evenly_and_a_small_one_is_taken_whole():
    large = torch.arange(2 * SAMPLE + 1)
    thinned = sampled(large)
    assert thinned.numel() <= SAMPLE
    assert set((thinned[1:] - thinned[:-1]).tolist()) == {3}
    assert sampled(large[:SAMPLE]).numel() == SAMPLE


def test_describing_draws_no_random_number_and_keeps_no_graph():
    before = torch.get_rng_state()
    weight = torch.ones(3, requires_grad=True)
    assert describe(weight * 2).requires_grad
    assert not sampled(weight * 2).requires_grad
    assert torch.equal(torch.get_rng_state(), before)


def test_a_number_that_is_not_finite_is_none():
    assert [finite_or_none(torch.tensor(value)) for value in (1.5, NAN, INF, -INF)] == [1.5, None, None, None]


def test_rows_run_along_the_given_dimension():
    images = torch.arange(24).reshape(2, 3, 4)  # classes in dimension 1
    assert rows_of(images, 1).shape == (8, 3)
    assert rows_of(images, 1)[0].tolist() == [0, 4, 8]


def test_probabilities_and_log_probabilities_are_distinguished():
    logits = torch.tensor([[2.0, -1.0, 0.5], [0.0, 3.0, 1.0]])
    raw, soft, log = (as_distribution(made, 1) for made in (logits, logits.softmax(1), logits.log_softmax(1)))
    assert soft.sum_error == pytest.approx(0, abs=1e-6)
    assert log.log_sum_error == pytest.approx(0, abs=1e-6)
    assert min(raw.sum_error, raw.log_sum_error, soft.log_sum_error, log.sum_error) > 0.4
    assert (raw.rows, raw.classes) == (2, 3)


def test_labels_are_counted_unless_there_are_too_many_kinds():
    assert label_counts(torch.tensor([[2, 0], [2, 2]])) == {"0": 1, "2": 3}
    assert label_counts(torch.arange(257)) is None
    assert len(label_counts(torch.arange(256)) or {}) == 256


def test_equal_rows_share_a_fingerprint_wherever_they_stand():
    rows = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    first, second = fingerprints(rows), fingerprints(rows.flip(0)[:4])
    assert second == first[::-1][:4]
    assert len(set(first)) == 6
    assert len(fingerprints(rows, limit=2)) == 2


def test_rows_that_are_permutations_of_each_other_are_not_the_same():
    one, other = fingerprints(torch.tensor([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]]))
    assert one != other


def test_rows_with_nan_have_a_fingerprint_that_is_found_again():
    row = torch.tensor([[1.0, NAN]])
    assert fingerprints(row) == fingerprints(row.clone())
