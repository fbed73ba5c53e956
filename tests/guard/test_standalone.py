import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import surefoot as sf
from streams import INF, NAN, total, with_gradient


def parameters_with(*gradients):
    return [with_gradient(gradient).parameter for gradient in gradients]


def norm_of(gradients):
    return np.sqrt(sum(np.square(gradient.detach().to_dense().double().numpy()).sum() for gradient in gradients))


# ---- clip_gradients -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_norm", [0.01, 1.0, 17.0, 1e6])
def test_it_clips_the_same_bits_as_torch(max_norm):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(33, 65), torch.nn.Tanh(), torch.nn.Linear(65, 7))
    (model(torch.randn(64, 33)).square().mean() * 100).backward()
    other = copy.deepcopy(model)
    for parameter, twin in zip(model.parameters(), other.parameters(), strict=True):
        twin.grad = parameter.grad.clone()
    norm = sf.clip_gradients(model.parameters(), max_norm)
    assert torch.equal(norm, torch.nn.utils.clip_grad_norm_(other.parameters(), max_norm))
    for parameter, twin in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(parameter.grad, twin.grad)


def test_the_norm_returned_is_the_one_before_clipping():
    (parameter,) = parameters_with(torch.tensor([3.0, 4.0]))
    assert sf.clip_gradients([parameter], 1.0).item() == 5.0
    np.testing.assert_allclose(parameter.grad, [0.6, 0.8], rtol=1e-6)


def test_a_norm_below_the_limit_changes_no_bit():
    gradient = torch.randn(100)
    (parameter,) = parameters_with(gradient)
    sf.clip_gradients([parameter], 1e3)
    assert torch.equal(parameter.grad, gradient)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize(
    "clip",
    [1.0, sf.AdaptiveGradientClipper(), sf.ClipByZScore(), sf.ClipByQuantile(), sf.ClipPerTensor()],
    ids=lambda clip: type(clip).__name__,
)
def test_one_broken_entry_is_not_multiplied_into_the_other_gradients(bad, clip):
    healthy, broken = torch.randn(50) * 100, torch.tensor([1.0, bad, 2.0])
    parameters = parameters_with(healthy, broken)
    assert sf.clip_gradients(parameters, clip).isnan()
    assert torch.equal(parameters[0].grad, healthy)
    assert torch.equal(parameters[1].grad.nan_to_num(-7), broken.nan_to_num(-7))


def test_gradients_of_several_dtypes_are_clipped_together():
    torch.manual_seed(0)
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
    gradients = [torch.randn(40).to(dtype) for dtype in dtypes]
    parameters = parameters_with(*gradients)
    expected = norm_of(gradients)
    assert sf.clip_gradients(parameters, 1.0).item() == pytest.approx(expected, rel=1e-6)
    for parameter, before, dtype in zip(parameters, gradients, dtypes, strict=True):
        assert parameter.grad.dtype == dtype
        rounding = torch.finfo(dtype).eps + 1e-6
        np.testing.assert_allclose(parameter.grad.double(), before.double() / expected, rtol=rounding, atol=1e-7)


def test_parameters_without_a_gradient_are_passed_over():
    (parameter,) = parameters_with(torch.tensor([3.0, 4.0]))
    frozen = torch.nn.Parameter(torch.ones(3))
    assert sf.clip_gradients([frozen, parameter], 1.0).item() == 5.0
    assert frozen.grad is None


def test_no_gradient_at_all_has_the_norm_0():
    assert sf.clip_gradients([torch.nn.Parameter(torch.ones(3))], 1.0).item() == 0.0


def test_sparse_gradients_are_added_up_before_they_are_measured():
    embedding = torch.nn.Embedding(10, 4, sparse=True)
    embedding(torch.tensor([1, 1, 2])).sum().backward()
    dense = embedding.weight.grad.to_dense()
    norm = sf.clip_gradients(embedding.parameters(), 1.0)
    assert norm.item() == pytest.approx(norm_of([dense]), rel=1e-6)
    assert embedding.weight.grad.is_sparse
    np.testing.assert_allclose(embedding.weight.grad.to_dense(), dense / norm, rtol=1e-5)


@pytest.mark.parametrize(("dtype", "value"), [(torch.float16, 300.0), (torch.bfloat16, 300.0)])
def test_squares_that_overflow_half_precision_are_summed_in_fp32(dtype, value):
    gradient = torch.full((10_000,), value, dtype=dtype)
    (parameter,) = parameters_with(gradient)
    norm = sf.clip_gradients([parameter], 100.0)
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(norm_of([gradient]), rel=1e-6)
    np.testing.assert_allclose(parameter.grad.double(), 1.0, rtol=torch.finfo(dtype).eps)


def test_bfloat16_does_not_lose_small_entries_beside_large_ones():
    gradient = torch.cat([torch.full((1,), 256.0), torch.ones(65_536)]).bfloat16()
    (parameter,) = parameters_with(gradient)
    assert sf.clip_gradients([parameter], 1.0).item() == pytest.approx(np.sqrt(256.0**2 + 65_536), rel=1e-6)


@pytest.mark.parametrize("value", [1e20, 1e30])
def test_finite_gradients_whose_squares_overflow_fp32_are_clipped_right(value):
    parameters = parameters_with(torch.full((9,), value), torch.full((16,), -value))
    assert sf.clip_gradients(parameters, 1.0).item() == pytest.approx(5 * value, rel=1e-6)
    np.testing.assert_allclose(parameters[0].grad, 0.2, rtol=1e-6)
    np.testing.assert_allclose(parameters[1].grad, -0.2, rtol=1e-6)


ENTRIES = st.floats(-1e4, 1e4, width=32).filter(lambda value: value == 0 or abs(value) > 1e-15)
"""Of smaller entries the squares are not in the range of fp32."""


@given(st.lists(st.lists(ENTRIES, min_size=1, max_size=5), min_size=1, max_size=5))
def test_after_clipping_the_norm_is_at_most_the_limit(values):
    gradients = [torch.tensor(row) for row in values]
    parameters = parameters_with(*gradients)
    norm = sf.clip_gradients(parameters, 1.0).item()
    assert norm == pytest.approx(norm_of(gradients), rel=1e-5, abs=1e-30)
    assert norm_of([parameter.grad for parameter in parameters]) <= 1.0 + 1e-5


def test_a_running_clipper_keeps_its_history_between_calls():
    running = sf.Stateful(sf.AdaptiveGradientClipper(warmup_steps=3))
    for _ in range(5):
        sf.clip_gradients(parameters_with(torch.tensor([3.0, 4.0])), running)
    (exploded,) = parameters_with(torch.tensor([3e6, 4e6]))
    sf.clip_gradients([exploded], running)
    assert norm_of([exploded.grad]) == pytest.approx(10.0, rel=1e-4)


def test_a_missing_gradient_does_not_shift_the_history_of_the_others():
    running = sf.Stateful(sf.ClipPerTensor(warmup_steps=1, warmup_max_norm=1e9))
    first, second = parameters_with(torch.tensor([1.0]), torch.tensor([100.0]))
    for _ in range(3):
        sf.clip_gradients([first, second], running)
    first.grad, second.grad = None, torch.tensor([100.0])
    sf.clip_gradients([first, second], running)
    assert second.grad.item() == 100.0
    first.grad, second.grad = torch.tensor([100.0]), None
    sf.clip_gradients([first, second], running)
    assert first.grad.item() == pytest.approx(1.05)


def test_a_model_gives_its_names_so_that_its_head_can_be_left_out():
    model = torch.nn.ModuleDict({"body": torch.nn.Linear(3, 3), "head": torch.nn.Linear(3, 1)})
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    sf.clip_gradients(model, sf.AdaptiveUnitClip(exclude=("head.*",)))
    assert torch.equal(model["head"].weight.grad, torch.ones(1, 3))
    assert model["body"].weight.grad.max() < 0.1


def test_patterns_that_leave_nothing_out_are_logged_once(caplog):
    model = torch.nn.ModuleDict({"body": torch.nn.Linear(3, 3), "head": torch.nn.Linear(3, 1)})
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    model["body"].bias.grad = None
    for _ in range(3):
        sf.clip_gradients(model, sf.AdaptiveUnitClip(exclude=("head.*", "body.bias", "haed.*")))
        sf.clip_gradients(model.parameters(), sf.AdaptiveUnitClip(exclude=("nameless.*",)))
    sf.TrainingStabilizer(
        model, torch.optim.SGD(model.parameters(), 0.1), clip=sf.AdaptiveUnitClip(exclude=("head.*", "layer9.*"))
    )
    messages = [record.getMessage() for record in caplog.records]
    assert [message.split("'")[1] for message in messages] == ["haed.*", "nameless.*", "layer9.*"]
    assert "give the model, or `model.named_parameters()`" in messages[1]
    assert "without names" not in messages[0] + messages[2]


def test_a_clipper_after_a_shaper_sees_what_the_shaper_left():
    (parameter,) = parameters_with(torch.tensor([[100.0, 101.0], [100.0, 99.0]]))
    norm = sf.clip_gradients([parameter], (sf.CentralizeGradients(), sf.ClipByNorm(2.0)))
    assert norm.item() == pytest.approx(200.0, rel=1e-3)
    np.testing.assert_allclose(parameter.grad, [[-0.5, 0.5], [0.5, -0.5]])


def test_a_shaper_clips_too_and_the_norm_before_it_comes_back():
    (parameter,) = parameters_with(torch.tensor([3.0, -4.0]))
    assert sf.clip_gradients([parameter], sf.ClipByValue(1.0)).item() == 5.0
    assert parameter.grad.tolist() == [1.0, -1.0]


def test_something_that_is_no_clipper_is_refused_and_named():
    parameters = parameters_with(torch.ones(2))
    with pytest.raises(sf.SettingError, match=r"takes clippers such as ClipByNorm.*got 'norm'"):
        sf.clip_gradients(parameters, "norm")
    with pytest.raises(sf.SettingError, match="`max_norm` must be positive; got 0"):
        sf.clip_gradients(parameters, 0)


# ---- Stateful --------------------------------------------------------------------------------------------------------


def test_running_counts_the_steps_and_takes_a_real_step_over():
    monitor = sf.Stateful(sf.LossStabilityMonitor(window_steps=8))
    assert monitor.update(loss=1.0).evidence["step"] == 0
    assert monitor.update(loss=1.0, step=41).evidence["step"] == 41
    assert monitor.update(loss=1.0).evidence["step"] == 42


def test_running_gives_the_users_own_signals_to_a_detector():
    rule = sf.Stateful(sf.Spike(("kl",), min_steps=4, window_steps=8))
    healthy = [rule.update(kl=value).anomalous for value in (1.0, 1.1, 0.9, 1.0, 1.05, 0.95)]
    assert not any(healthy)
    assert rule.update(kl=1e6).anomalous


def test_a_saved_detector_continues_where_it_stopped():
    stream = [1.0 + 0.1 * (i % 3) for i in range(30)]
    first = sf.Stateful(sf.Explosion(min_steps=5))
    for norm in stream:
        first.update(grad_norm=norm)
    second = sf.Stateful(sf.Explosion(min_steps=5))
    second.load_state_dict(first.state_dict())
    assert second.steps == 30
    for norm in (1e9, 1.0, 1e3, 40.0, NAN, 1.0):
        assert bool(second.update(grad_norm=norm).anomalous) == bool(first.update(grad_norm=norm).anomalous)


def test_a_saved_clipper_per_tensor_continues_where_it_stopped():
    first = sf.Stateful(sf.ClipPerTensor(warmup_steps=2))
    for norm in (1.0, 2.0, 1.5):
        first.factor(total(norm, [norm, 2 * norm]))
    second = sf.Stateful(sf.ClipPerTensor(warmup_steps=2))
    second.load_state_dict(first.state_dict(), count=2)
    for norm in (9.0, 1.0):
        assert torch.equal(second.factor(total(norm, [norm, norm])), first.factor(total(norm, [norm, norm])))


def test_a_part_that_was_saved_before_its_first_step_starts_fresh():
    second = sf.Stateful(sf.Explosion())
    second.load_state_dict(sf.Stateful(sf.Explosion()).state_dict())
    assert not second.update(grad_norm=1.0).anomalous
