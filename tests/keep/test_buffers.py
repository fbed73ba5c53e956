"""Running statistics that took a broken batch in are put back with the step."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import surefoot as sf
from surefoot.keep.buffers import CHECK_STEPS, BufferKeeper, RunningStatistics


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))


def train(decide_on: str, spoiled: dict[int, float], steps: int = 30, left_out: tuple[int, ...] = ()) -> nn.Sequential:
    net = normed()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)
    stabilizer = sf.TrainingStabilizer(net, optimizer, decide_on=decide_on)
    for step in range(steps):
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
        if step in left_out:
            continue
        x[0, 0] = spoiled.get(step, float(x[0, 0]))
        stabilizer.backward((net(x) - 1).square().mean())
        stabilizer.step()
    assert stabilizer.counts["skipped"] == len(spoiled)
    return net


@pytest.mark.parametrize("bad_step", [0, 12])
def test_a_refused_batch_leaves_no_trace_in_batch_norm(bad_step):
    with_bad, without = train("host", {bad_step: math.nan}), train("host", {}, left_out=(bad_step,))
    for (name, one), other in zip(with_bad.state_dict().items(), without.state_dict().values(), strict=True):
        assert torch.equal(one, other), name


def test_decided_on_a_device_the_statistics_are_sound_again_once_the_verdict_is_in():
    net = train("device", {12: math.nan, 14: math.inf})
    clean = train("device", {})
    assert bool(torch.isfinite(net[1].running_mean).all())
    torch.testing.assert_close(net[1].running_mean, clean[1].running_mean, rtol=0.3, atol=0.1)


def test_a_healthy_run_copies_only_what_changes():
    net = normed()
    net.register_buffer("table", torch.arange(10.0))
    keeper = BufferKeeper([net])
    net(torch.randn(8, 4))
    keeper.save(1)
    before, after = keeper._copies[0], keeper._copies[1]
    shared = [a is b for a, b in zip(before, after, strict=True)]
    assert shared == [True, False, False, False]


def test_a_model_moved_after_construction_is_restored_where_it_is_now():
    net = normed()
    keeper = BufferKeeper([net])
    net.double()
    keeper.save(1)
    net[1].running_mean.fill_(math.nan)
    keeper.restore(1)
    assert net[1].running_mean.dtype == torch.float64
    assert bool((net[1].running_mean == 0).all())


def test_what_is_kept_does_not_grow_with_the_run():
    net = normed()
    stabilizer = sf.TrainingStabilizer(net, torch.optim.SGD(net.parameters(), lr=0.1), decide_on="device", lag_steps=3)
    for _ in range(20):
        stabilizer.backward(net(torch.randn(8, 4)).square().mean())
        stabilizer.step()
    assert len(stabilizer._run.results.buffers._copies) <= 5


def step_once(net: nn.Module, stabilizer: sf.TrainingStabilizer, spoiled: bool = False) -> None:
    x = torch.full((16, 4), math.nan) if spoiled else torch.randn(16, 4)
    stabilizer.backward((net(x) - 1).square().mean())
    stabilizer.step()


def set_to_none(net: nn.Module) -> None:
    net.table = None


def delete(net: nn.Module) -> None:
    del net.table


def enlarge(net: nn.Module) -> None:
    net.table = torch.zeros(7)


def replace_under_inference_mode(net: nn.Module) -> None:
    with torch.inference_mode():
        net.table = torch.zeros(3)


def expand(net: nn.Module) -> None:
    net.table = torch.zeros(1).expand(3)


@pytest.mark.parametrize("change", [set_to_none, delete, enlarge, replace_under_inference_mode, expand])
def test_a_buffer_that_is_not_what_it_was_is_left_alone_and_the_run_continues(change):
    net = normed()
    net.register_buffer("table", torch.zeros(3))
    stabilizer = sf.TrainingStabilizer(net, torch.optim.SGD(net.parameters(), lr=0.1), recovery=sf.TrainingRecovery())
    step_once(net, stabilizer)
    change(net)
    step_once(net, stabilizer, spoiled=True)
    step_once(net, stabilizer)
    assert stabilizer.counts["skipped"] == 1
    assert bool(torch.isfinite(net[1].running_mean).all())


def guarded(how: str) -> tuple[nn.Sequential, Any, Any]:
    """A network and a function that takes a step, through a stabilizer or an attachment."""
    net = normed()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    if how == "stabilizer":
        stabilizer = sf.TrainingStabilizer(net, optimizer)
        return net, lambda spoiled=False: step_once(net, stabilizer, spoiled), stabilizer
    attachment = sf.attach(net, optimizer)

    def step(spoiled: bool = False) -> None:
        optimizer.zero_grad()
        x = torch.full((16, 4), math.nan) if spoiled else torch.randn(16, 4)
        (net(x) - 1).square().mean().backward()
        optimizer.step()

    return net, step, attachment


def load_fives(net: nn.Sequential) -> None:
    state = {name: value.clone() for name, value in net.state_dict().items()}
    state["1.running_mean"].fill_(5.0)
    net.load_state_dict(state)


def load_fives_into_a_part(net: nn.Sequential) -> None:
    state = {name: value.clone() for name, value in net[1].state_dict().items()}
    state["running_mean"].fill_(5.0)
    net[1].load_state_dict(state)


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("load", [load_fives, load_fives_into_a_part])
@pytest.mark.parametrize("how", ["stabilizer", "attach"])
def test_a_refused_step_goes_back_to_statistics_that_were_loaded_since_the_last_one(how, load, mode):
    net, step, run = guarded(how)
    for _ in range(3):
        step()
    load(net)
    net.train(mode == "train")
    step(spoiled=True)
    assert run.counts["skipped"] == 1
    assert net[1].running_mean.tolist() == [5.0] * 8
    assert int(net[1].num_batches_tracked) == 3


@pytest.mark.parametrize("how", ["stabilizer", "attach"])
def test_statistics_that_update_bn_has_measured_are_left_alone_unless_the_step_breaks_them(how):
    net, step, _ = guarded(how)
    for _ in range(3):
        step()
    before = net[1].running_mean.clone()
    torch.optim.swa_utils.update_bn([torch.randn(64, 4) + 9 for _ in range(4)], net)
    measured = net[1].running_mean.clone()
    assert not torch.allclose(before, measured)
    net.eval()
    step(spoiled=True)
    assert torch.equal(net[1].running_mean, measured)
    assert int(net[1].num_batches_tracked) == 4
    net.train()
    step(spoiled=True)
    assert bool(net[1].running_mean.isfinite().all())


def test_a_compiled_batch_norm_is_restored_though_it_counts_its_writes():
    norm = nn.BatchNorm1d(4)
    compiled = torch.compile(norm, backend="aot_eager")
    compiled(torch.randn(8, 4))
    keeper = BufferKeeper([norm])
    before = norm.running_mean.clone()
    compiled(torch.randn(8, 4) * 1e6)
    keeper.restore(0)
    assert torch.equal(norm.running_mean, before)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_scripted_model_can_be_guarded():
    net = torch.jit.script(normed())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    attachment = sf.attach(net, optimizer)
    net(torch.full((16, 4), math.nan)).mean().backward()
    optimizer.step()
    net.load_state_dict(net.state_dict())
    attachment.detach()
    assert attachment.counts["skipped"] == 1
    assert all(bool(value.isfinite().all()) for value in net.state_dict().values())


def test_copies_and_pickles_of_a_guarded_model_know_nothing_of_the_guard():
    net, step, attachment = guarded("attach")
    step()
    pickled = pickle.dumps(net)
    assert b"surefoot" not in pickled
    for twin in (copy.deepcopy(net), pickle.loads(pickled)):
        load_fives(twin)
        assert twin[1].running_mean.tolist() == [5.0] * 8
    step(spoiled=True)
    assert net[1].running_mean.tolist() != [5.0] * 8
    attachment.detach()
    assert not any(module._load_state_dict_post_hooks for module in net.modules())


def test_a_frozen_table_of_whole_numbers_in_the_optimizer_is_no_reason_to_fail_at_a_bad_batch():
    net = normed()
    net.register_parameter("codes", nn.Parameter(torch.arange(5), requires_grad=False))
    stabilizer = sf.TrainingStabilizer(net, torch.optim.SGD(net.parameters(), lr=0.1), recovery=sf.TrainingRecovery())
    step_once(net, stabilizer, spoiled=True)
    assert stabilizer.counts["skipped"] == 1


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
