import numpy as np
import pytest
import torch

from surefoot.build import clip_advice

NORMS = np.random.default_rng(0).lognormal(0.0, 0.4, 1_000)


def test_more_than_half_the_steps_clipped_is_reported_with_a_higher_limit():
    advice = clip_advice(NORMS, max_norm=0.5)
    assert advice.verdict == "raise"
    assert advice.clipped_share == pytest.approx((NORMS > 0.5).mean())
    assert advice.clipped_share > 0.5
    assert "%" in advice.summary


def test_the_suggested_limit_is_the_95th_percentile_and_then_fits():
    suggested = clip_advice(NORMS, max_norm=0.5).suggested_max_norm
    assert suggested == pytest.approx(np.percentile(NORMS, 95))
    again = clip_advice(NORMS, max_norm=suggested)
    assert again.verdict == "fits"
    assert again.clipped_share == pytest.approx(0.05, abs=0.002)


def test_a_limit_nothing_reaches_should_be_lowered():
    assert clip_advice(NORMS, max_norm=100.0).verdict == "lower"


def test_without_a_limit_a_first_one_is_suggested():
    advice = clip_advice(NORMS)
    assert (advice.verdict, advice.clipped_share) == ("no_limit", None)
    assert advice.suggested_max_norm == pytest.approx(np.percentile(NORMS, 95))


def test_a_climbing_norm_is_a_problem_that_clipping_hides():
    advice = clip_advice(NORMS * np.geomspace(1.0, 50.0, 1_000), max_norm=1.0)
    assert (advice.verdict, advice.suggested_max_norm) == ("hiding_a_problem", None)


def test_jumps_by_orders_of_magnitude_are_a_problem_that_clipping_hides():
    jumping = NORMS.copy()
    jumping[::50] *= 1e4
    assert clip_advice(jumping, max_norm=2.0).verdict == "hiding_a_problem"


def test_norms_that_are_not_finite_are_counted_and_reported():
    broken = NORMS.copy()
    broken[[3, 4]] = np.nan, np.inf
    advice = clip_advice(broken, max_norm=2.0)
    assert (advice.verdict, advice.nonfinite_steps, advice.steps) == ("hiding_a_problem", 2, 1_000)


def test_a_falling_norm_is_healthy():
    assert clip_advice(NORMS * np.geomspace(50.0, 1.0, 1_000), max_norm=60.0).verdict == "fits"


def test_few_norms_give_no_verdict():
    assert clip_advice(NORMS[:49], max_norm=1.0).verdict == "insufficient_data"
    assert clip_advice([]).verdict == "insufficient_data"


def test_norms_recorded_after_clipping_are_refused():
    with pytest.raises(ValueError, match="after clipping"):
        clip_advice(np.minimum(NORMS, 1.0), max_norm=1.0)


def test_a_tensor_and_a_list_and_a_generator_say_the_same():
    expected = clip_advice(NORMS, max_norm=1.0)
    assert clip_advice(NORMS.tolist(), max_norm=1.0) == expected
    assert clip_advice(torch.tensor(NORMS), max_norm=1.0) == expected
    assert clip_advice((float(norm) for norm in NORMS), max_norm=1.0) == expected


def test_norms_of_zero_do_not_divide_by_zero():
    assert clip_advice([0.0] * 100, max_norm=1.0).verdict == "lower"


@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan"), float("inf")])
def test_an_impossible_limit_is_refused(limit):
    with pytest.raises(ValueError, match="max_norm"):
        clip_advice(NORMS, max_norm=limit)


def test_a_negative_norm_is_refused():
    with pytest.raises(ValueError, match="negative"):
        clip_advice([-1.0] * 100)


def test_norms_of_half_precision_or_with_a_gradient_are_read():
    norms = torch.tensor(NORMS).bfloat16()
    expected = clip_advice(norms.double(), 1.0)
    assert clip_advice(norms, 1.0) == expected
    assert clip_advice([norm.clone().requires_grad_() for norm in norms], 1.0) == expected


def test_a_run_whose_norms_are_all_nan_is_a_problem_and_not_a_lack_of_data():
    advice = clip_advice([float("nan")] * 200, 1.0)
    assert advice.verdict == "hiding_a_problem"
    assert "200 of 200" in advice.summary
