"""Running statistics of batch norm that are not finite are noticed and put back."""

import pytest
import torch
from torch import nn

import surefoot as sf
from surefoot.keep.statistics import CHECK_STEPS, RunningStatistics


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))


def run(steps, meanwhile=lambda step, model: None, **settings):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    stabilizer = sf.TrainingStabilizer(model, optimizer, **settings)
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        x = torch.randn(16, 4, generator=generator)
        stabilizer.backward(model(x).square().mean())
        stabilizer.step()
        meanwhile(step, model)
    return model, stabilizer


def forward_of_a_nan(step, model):
    if step == 24:
        with torch.no_grad():
            model(torch.full((16, 4), torch.nan))  # somebody evaluates in training mode


@pytest.mark.parametrize("decide_on", ["host", "device"])
def test_a_forward_that_is_no_step_does_not_break_them_for_good(decide_on):
    model, stabilizer = run(60, forward_of_a_nan, decide_on=decide_on)
    assert all(bool(each.isfinite().all()) for each in model.buffers())
    said = [each for each in stabilizer.incidents if each.kind == "norm.broken-statistics"]
    assert len(said) == 1
    assert "1.running_mean and 1 more is not finite" in said[0].summary
    assert "restored to step 20" in said[0].summary
    assert model.eval()(torch.zeros(1, 4)).isfinite().all()


def test_what_is_put_back_is_close_to_what_the_statistics_would_be():
    broken, clean = run(60, forward_of_a_nan)[0], run(60)[0]
    torch.testing.assert_close(broken[1].running_mean, clean[1].running_mean, atol=0.05, rtol=0.2)
    assert all(torch.equal(a, b) for a, b in zip(broken.parameters(), clean.parameters(), strict=True))


def test_sound_statistics_are_left_alone():
    model = net()
    before = {name: each.clone() for name, each in model.named_buffers()}
    statistics = RunningStatistics([model])
    assert [statistics.check(step) for step in range(3 * CHECK_STEPS)] == [None] * 3 * CHECK_STEPS
    assert all(torch.equal(each, before[name]) for name, each in model.named_buffers())


def test_large_statistics_are_finite():
    model = net()
    model[1].running_var.fill_(3e38)
    assert RunningStatistics([model]).check(CHECK_STEPS) is None


def test_broken_from_the_start_there_is_nothing_to_put_back():
    model = net()
    model[1].running_mean.fill_(torch.nan)
    assert "no earlier copy" in RunningStatistics([model]).check(CHECK_STEPS)


def test_a_model_without_batch_norm_costs_nothing():
    statistics = RunningStatistics([nn.Linear(2, 2)])
    assert all(statistics.check(step) is None for step in range(50))
    assert statistics._read is None
