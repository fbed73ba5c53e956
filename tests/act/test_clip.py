import math
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import surefoot as sf
from part_arguments import exported_from, made
from streams import INF, NAN, factors, norm_streams, same, total
from surefoot.act import clip
from surefoot.act.clip import limit_factor
from surefoot.core.state_tree import pack
from surefoot.types import GradientNorms

SHORT = {"warmup_steps": 3, "window_steps": 8}
"""Settings with which a clipper is warm after a few steps; each is given those it has."""


def shortened(clipper):
    return replace(clipper, **{each.name: SHORT[each.name] for each in fields(clipper) if each.name in SHORT})


CLIPPERS = [shortened(made(name)) for name in exported_from(clip)]
every_clipper = pytest.mark.parametrize("clipper", CLIPPERS, ids=lambda clipper: type(clipper).__name__)


# ---- the formulas, in float64 --------------------------------------------------------------------------------------


def pull_to(limit, norm):
    return min(1.0, limit / (norm + 1e-6))


def by_norm(stream, max_norm):
    return [pull_to(max_norm, norm) if math.isfinite(norm) else 1.0 for norm in stream]


def adaptive(stream, clipper):
    mean, seen, found = 0.0, 0, []
    for norm in np.float64(stream):
        if not np.isfinite(norm):
            found.append(1.0)
            continue
        warming = seen < clipper.warmup_steps or mean <= 0
        limit = (clipper.warmup_max_norm or INF) if warming else clipper.factor * mean
        limit = min(limit, clipper.max_norm or INF)
        found.append(min(1.0, limit / (norm + 1e-6)))
        clipped = min(norm, limit)
        if norm == 0:
            continue
        if warming:
            if 0 < seen <= max(1, clipper.warmup_steps // 8):
                mean = min(mean, 10 * clipped)
            clipped = min(clipped, 10 * mean) if seen else clipped
            mean = (seen * mean + clipped) / (seen + 1)
        else:
            moved = clipper.momentum * mean + (1 - clipper.momentum) * clipped
            mean = min(moved, clipper.max_growth * mean)
        seen += 1
    return found, mean


def zclip(stream, clipper):
    """Kumar et al., 2025: the mean moves first, and the variance is taken around where it has moved to."""
    warm, mean, variance, found = [], 0.0, 0.0, []
    for norm in np.float64(stream):
        if not np.isfinite(norm):
            found.append(1.0)
        elif len(warm) < clipper.warmup_steps:
            warm.append(norm)
            mean, variance = np.mean(warm), np.var(warm)
            found.append(1.0)
        else:
            deviation = np.sqrt(variance)
            z = (norm - mean) / (deviation + 1e-6)
            clipped = mean + clipper.threshold / (z / clipper.threshold) * deviation if z > clipper.threshold else norm
            found.append(pull_to(clipped, norm) if clipped < norm else 1.0)
            mean = clipper.momentum * mean + (1 - clipper.momentum) * clipped
            variance = clipper.momentum * variance + (1 - clipper.momentum) * (clipped - mean) ** 2
    return found, mean, variance


def autoclip(stream, clipper):
    window, seen, found = [], 0, []
    for norm in np.float64(stream):
        if not np.isfinite(norm):
            found.append(1.0)
            continue
        window, seen = [*window, norm][-clipper.window_steps :], seen + 1
        limit = np.quantile(window, clipper.quantile)
        found.append(pull_to(limit, norm) if seen > clipper.warmup_steps else 1.0)
    return found


def adagc(stream, clipper):
    """Wang et al., 2025, one row of norms per step; a tensor without any gradient so far is let through."""
    means, seen, found = None, 0, []
    for row in np.float64(stream):
        if not np.isfinite(row).all():
            found.append(np.ones(len(row)))
            continue
        means = np.zeros(len(row)) if means is None else means
        if seen < clipper.warmup_steps:
            factor = np.full(len(row), pull_to(clipper.warmup_max_norm, np.linalg.norm(row)))
        else:
            factor = np.array(
                [min(1.0, clipper.factor * m / g) if m > 0 and g > 0 else 1.0 for m, g in zip(means, row, strict=True)]
            )
        for i, clipped in enumerate(factor * row):
            if clipped == 0:
                continue
            if means[i] == 0:
                means[i] = clipped
            elif seen < clipper.warmup_steps:
                means[i] = min(means[i], clipped)
            else:
                means[i] = clipper.momentum * means[i] + (1 - clipper.momentum) * clipped
        seen += 1
        found.append(factor)
    return found


@given(norm_streams(), st.sampled_from([1e-3, 1.0, 100.0]))
def test_clip_by_norm_is_its_formula(stream, max_norm):
    np.testing.assert_allclose(factors(sf.ClipByNorm(max_norm), stream), by_norm(stream, max_norm), rtol=1e-6)


@given(
    norm_streams(),
    st.sampled_from(
        [
            sf.AdaptiveGradientClipper(warmup_steps=3),
            sf.AdaptiveGradientClipper(1.5, momentum=0.5, max_growth=1.2, warmup_steps=5, warmup_max_norm=1.0),
            sf.AdaptiveGradientClipper(momentum=0.0, warmup_steps=1, max_norm=1.25),
        ]
    ),
)
def test_adaptive_gradient_clipper_is_its_formula(stream, clipper):
    expected, mean = adaptive(stream, clipper)
    state = clipper.init(1)
    for norm in stream:
        state, _ = clipper.update(state, total(norm))
    np.testing.assert_allclose(factors(clipper, stream), expected, rtol=1e-4)
    np.testing.assert_allclose(state.mean.item(), mean, rtol=1e-4)


@given(norm_streams())
def test_clip_by_z_score_is_zclip(stream):
    clipper = sf.ClipByZScore(warmup_steps=4)
    # A spread of rounding noise alone has no meaning to pin: start from norms that differ.
    stream = [0.75, 1.25, 1.0, 1.5, *stream]
    expected, mean, variance = zclip(stream, clipper)
    state = clipper.init(1)
    for norm in stream:
        state, _ = clipper.update(state, total(norm))
    np.testing.assert_allclose(factors(clipper, stream), expected, rtol=1e-4)
    np.testing.assert_allclose([state.mean.item(), state.variance.item()], [mean, variance], rtol=1e-4)


@given(
    norm_streams(),
    st.sampled_from(
        [sf.ClipByQuantile(0.5, 8, 1), sf.ClipByQuantile(0.9, 20, 4), sf.ClipByQuantile(1.0), sf.ClipByQuantile(0.1)]
    ),
)
def test_clip_by_quantile_is_autoclip_over_a_window(stream, clipper):
    np.testing.assert_allclose(factors(clipper, stream), autoclip(stream, clipper), rtol=1e-5)


rows = st.lists(
    st.tuples(*[st.sampled_from([0.0, 0.25, 0.5, 1.0, 1.125, 4.0, 1e4, NAN, INF])] * 3), min_size=12, max_size=40
)


@given(rows)
def test_clip_per_tensor_is_adagc(stream):
    clipper = sf.ClipPerTensor(warmup_steps=4, momentum=0.75)
    state, found = clipper.init(3), []
    for row in stream:
        each = torch.tensor(row)
        state, factor = clipper.update(state, GradientNorms(torch.linalg.vector_norm(each), each))
        found.append(factor.expand(3).tolist())
    np.testing.assert_allclose(found, adagc(stream, clipper), rtol=1e-5)


# ---- what holds for every clipper ----------------------------------------------------------------------------------


@every_clipper
@given(norm_streams())
def test_a_factor_lies_above_0_and_never_above_1(clipper, stream):
    assert all(0 < factor <= 1 for factor in factors(clipper, stream))


@every_clipper
@pytest.mark.parametrize("norm", [NAN, INF])
def test_a_norm_that_is_not_finite_gives_factor_1_and_leaves_the_history(clipper, norm):
    state = clipper.init(1)
    for healthy in (1.0, 1.5, 0.75, 1.25, 1.0, 1.25):
        state, _ = clipper.update(state, total(healthy))
    after, factor = clipper.update(state, total(norm))
    assert factor.min().item() == 1.0
    assert same(pack(after), pack(state))


@every_clipper
def test_the_first_steps_may_all_be_broken(clipper):
    healthy = [1.0, 1.5, 0.75, 1.25, 1.0, 30.0, 1.0]
    assert factors(clipper, [NAN, INF, NAN, *healthy])[3:] == factors(clipper, healthy)


def test_limit_factor_is_1_where_the_limit_is_not_finite():
    limits = torch.tensor([NAN, INF, 1.0])
    assert limit_factor(torch.full((3,), 4.0), limits).tolist() == pytest.approx([1.0, 1.0, 0.25])


# ---- AdaptiveGradientClipper ---------------------------------------------------------------------------------------


def settled(clipper, norm=1.0, count=40):
    state = clipper.init(1)
    for _ in range(count):
        state, _ = clipper.update(state, total(norm))
    return state


@pytest.mark.parametrize("size", [1e2, 1e10, 1e30])
def test_the_threshold_does_not_rise_with_an_explosion(size):
    clipper = sf.AdaptiveGradientClipper()
    state = settled(clipper)
    state, factor = clipper.update(state, total(size))
    assert factor.item() * size == pytest.approx(2.0, rel=1e-5)
    assert state.mean.item() == pytest.approx(0.99 * 1.0 + 0.01 * 2.0, rel=1e-5)


@given(st.lists(st.floats(0, 2.0**100, width=32), max_size=60), st.floats(1.001, 2.0), st.floats(0.0, 0.99))
def test_an_explosion_raises_the_mean_by_at_most_max_growth_a_step(explosion, growth, momentum):
    clipper = sf.AdaptiveGradientClipper(factor=10.0, max_growth=growth, momentum=momentum)
    state = settled(clipper)
    for norm in explosion:
        before = state.mean.item()
        state, _ = clipper.update(state, total(norm))
        assert state.mean.item() <= before * growth * (1 + 1e-6)


@pytest.mark.parametrize("first", [[1e6], [1e30], [1e6, 1e6], [1.0, 1e6, 1e6]])
def test_an_explosion_at_the_very_first_steps_does_not_set_the_history(first):
    clipper = sf.AdaptiveGradientClipper()
    state = clipper.init(1)
    for norm in [*first, *[1.0] * 30]:
        state, factor = clipper.update(state, total(norm))
    assert factor.item() == 1.0
    assert 2.0 <= clipper.factor * state.mean.item() <= 10.0


@pytest.mark.parametrize("place", range(20))
@pytest.mark.parametrize("size", [1e-3, 1e-4])
def test_a_tiny_norm_among_the_first_does_not_set_the_history_either(place, size):
    clipper = sf.AdaptiveGradientClipper()
    norms = [1.0] * 20
    norms[place] = size
    state = clipper.init(1)
    for norm in norms:
        state, _ = clipper.update(state, total(norm))
    assert clipper.factor * state.mean.item() > 1.0
    assert clipper.update(state, total(1.0))[1].item() == 1.0


def test_a_lasting_new_level_is_followed():
    clipper = sf.AdaptiveGradientClipper()
    state = settled(clipper)
    for _ in range(1_000):
        state, factor = clipper.update(state, total(50.0))
    assert factor.item() == 1.0
    assert state.mean.item() == pytest.approx(50.0, rel=0.2)


def test_nan_never_enters_the_history():
    clipper = sf.AdaptiveGradientClipper()
    state = settled(clipper)
    for _ in range(10):
        after, _ = clipper.update(state, total(NAN))
        assert same(pack(after), pack(state))
    _, factor = clipper.update(after, total(10.0))
    assert factor.item() == pytest.approx(0.2, rel=1e-5)


def test_the_history_is_two_numbers_however_long_the_run():
    state = settled(sf.AdaptiveGradientClipper(), count=500)
    assert [part.numel() for part in state] == [1, 1]


def test_a_saved_history_continues_where_it_stopped():
    first = sf.Stateful(sf.AdaptiveGradientClipper(warmup_steps=3))
    for norm in (1.0, 1.5, 1.25, 40.0):
        first.factor(total(norm))
    second = sf.Stateful(sf.AdaptiveGradientClipper(warmup_steps=3))
    second.load_state_dict(first.state_dict())
    for norm in (9.0, 1.0, 3.0, 2.0):
        assert torch.equal(second.factor(total(norm)), first.factor(total(norm)))
    assert second.steps == 8


def test_a_history_of_other_settings_is_refused_with_both_named():
    saved = sf.Stateful(sf.AdaptiveGradientClipper(factor=2.0)).state_dict()
    with pytest.raises(sf.UsageError, match=r"factor=2\.0.*factor=3\.0"):
        sf.Stateful(sf.AdaptiveGradientClipper(factor=3.0)).load_state_dict(saved)


def test_zeros_during_warm_up_do_not_freeze_the_weights():
    clipper = sf.AdaptiveGradientClipper(warmup_steps=3)
    found = factors(clipper, [0.0] * 6 + [1.0])
    assert found == [1.0] * 7


def test_the_hard_limit_holds_whatever_the_history_says():
    clipper = sf.AdaptiveGradientClipper(max_norm=0.5)
    found = factors(clipper, [4.0] * 60)
    np.testing.assert_allclose(found, 0.125, rtol=1e-5)


# ---- ClipByQuantile, ClipByZScore, ClipPerTensor -------------------------------------------------------------------


@given(st.floats(1e3, 2.0**100, width=32))
def test_one_explosion_moves_a_quantile_by_one_rank_however_large(size):
    clipper = sf.ClipByQuantile(0.5, window_steps=16, warmup_steps=4)
    history = [float(norm) for norm in range(1, 12)]
    factor = factors(clipper, [*history, size])[-1]
    assert factor * size == pytest.approx(6.5, rel=1e-4)


def test_the_window_of_a_quantile_forgets_what_is_older():
    clipper = sf.ClipByQuantile(1.0, window_steps=4, warmup_steps=1)
    state = clipper.init(1)
    for norm in (100.0, 1.0, 1.0, 1.0, 1.0):
        state, _ = clipper.update(state, total(norm))
    assert state.window.tolist() == [1.0] * 4


@given(st.floats(10.0, 1e6))
def test_the_further_out_the_harder_z_clip_pulls(size):
    clipper = sf.ClipByZScore(warmup_steps=8)
    history = [0.5, 1.5] * 8
    near, far = (factors(clipper, [*history, norm])[-1] * norm for norm in (size, 2 * size))
    assert 1.0 - 1e-3 < far <= near * (1 + 1e-5)
    assert near < 1.0 + 2.5 * 0.5


def test_one_tensor_exploding_leaves_the_others_alone():
    clipper = sf.ClipPerTensor(warmup_steps=2, warmup_max_norm=10.0)
    state = clipper.init(3)
    each = torch.tensor([1.0, 2.0, 0.5])
    for _ in range(5):
        state, factor = clipper.update(state, GradientNorms(torch.linalg.vector_norm(each), each))
    spiked = torch.tensor([1.0, 2_000.0, 0.5])
    state, factor = clipper.update(state, GradientNorms(torch.linalg.vector_norm(spiked), spiked))
    np.testing.assert_allclose(factor.tolist(), [1.0, 1.05 * 2 / 2_000, 1.0], rtol=1e-5)


def test_an_explosion_during_warm_up_does_not_make_the_first_threshold():
    clipper = sf.Stateful(sf.AdaptiveGradientClipper(warmup_steps=10))
    for norm in (1.0, 1.0, 1.0, 1e6, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0):
        clipper.factor(total(norm))
    assert float(clipper.factor(total(100.0))) < 0.1


def test_gradients_of_exactly_zero_leave_the_threshold_where_it_was():
    clipper = sf.Stateful(sf.AdaptiveGradientClipper(warmup_steps=3))
    for norm in (0.0, 1.0, 1.0, 1.0, *[0.0] * 500):
        clipper.factor(total(norm))
    assert float(clipper.factor(total(1.5))) == 1.0
