"""A stabilizer with a log looks closely at sampled steps; the loop is bitwise the bare one."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import surefoot as sf
from loops import differences, everything, train_bare, train_guarded
from surefoot.record.bins import COUNT, ZERO

STEPS = 30
LOOKED = [0, 1, 2, 3, 5, 8, 12, 18, 27]


@pytest.mark.parametrize("decide_on", ["host", "device"])
@pytest.mark.parametrize(("model", "precision", "accumulate"), [("cnn with batch norm", "fp32", 1), ("mlp", "fp16", 2)])
def test_a_run_with_a_log_is_bitwise_the_bare_run(tmp_path, decide_on, model, precision, accumulate):
    bare = everything(*train_bare(model, "fused adamw", precision, accumulate, STEPS))
    random = torch.get_rng_state()
    net, opt, stabilizer = train_guarded(
        model, "fused adamw", precision, accumulate, STEPS, decide_on=decide_on, log=tmp_path
    )
    assert differences(bare, everything(net, opt)) == []
    assert torch.equal(random, torch.get_rng_state())
    assert not any(module._forward_hooks for module in net.modules())
    stabilizer.log.close()
    assert {row["kind"] for row in sf.load_run(tmp_path).histograms.to_pylist()} == {"weight", "gradient", "activation"}


def logged(tmp_path, steps=STEPS, break_at=None, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
    with torch.no_grad():
        model[0].bias[:4] = -1e6
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, fused=True)
    stabilizer = sf.TrainingStabilizer(model, optimizer, log=tmp_path, **settings)
    for step in range(steps):
        loss = model(torch.randn(32, 6)).square().mean()
        stabilizer.backward(loss * math.nan if step == break_at else loss)
        stabilizer.step()
    assert stabilizer.counts["steps"] == steps
    stabilizer.log.close()
    return sf.load_run(tmp_path)


def test_rows_of_a_sampled_step_hold_gradients_and_updates_together(tmp_path):
    rows = logged(tmp_path).layers.to_pylist()
    weights = [row for row in rows if row["layer"] == "0.weight"]
    assert [row["step"] for row in weights] == list(range(STEPS))
    assert [row["step"] for row in weights if row["update_ratio"] is not None] == LOOKED
    assert all(row["grad_norm"] is not None for row in weights)
    assert all(0 < row["update_ratio"] < 1 for row in weights if row["update_ratio"] is not None)
    dead = [row for row in rows if row["dead_share"] is not None]
    assert [row["step"] for row in dead] == LOOKED[1:], "no activations of the first step"
    assert {(row["layer"], row["dead_share"]) for row in dead} == {("1", 4 / 16)}


def test_histograms_of_sampled_steps_are_in_the_tables(tmp_path):
    rows = logged(tmp_path, decide_on="device").histograms.to_pylist()
    assert sorted({row["step"] for row in rows}) == LOOKED
    gradient = next(row for row in rows if (row["kind"], row["layer"]) == ("gradient", "0.weight"))
    assert len(gradient["counts"]) == COUNT
    assert sum(gradient["counts"]) == 6 * 16
    assert gradient["counts"][ZERO] >= 4 * 6, "the dead units get no gradient"


def test_a_broken_gradient_is_counted_as_such(tmp_path):
    rows = logged(tmp_path, break_at=8).histograms.to_pylist()
    broken = [row for row in rows if row["kind"] == "gradient" and row["layer"] == "2.bias" and row["nan"]]
    assert [(row["step"], row["nan"], sum(row["counts"])) for row in broken] == [(8, 2, 0)]


def test_gradients_under_a_loss_scale_are_shown_as_they_are(tmp_path):
    plain = logged(tmp_path / "plain").histograms.to_pylist()
    scaled = logged(tmp_path / "scaled", scaler=sf.DynamicLossScaler(initial_scale=2.0**14)).histograms.to_pylist()
    pick = [
        {(row["step"], row["layer"]): row["counts"] for row in rows if row["kind"] == "gradient" and row["step"] == 0}
        for rows in (plain, scaled)
    ]
    assert pick[0] == pick[1]


def test_without_a_log_nobody_looks():
    model = nn.Linear(2, 2)
    stabilizer = sf.TrainingStabilizer(model, torch.optim.SGD(model.parameters()))
    assert stabilizer._run.guard.guarded._sampler is None


def saturating(tmp_path, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
    with torch.no_grad():
        model[0].weight.mul_(20)
    stabilizer = sf.TrainingStabilizer(model, torch.optim.SGD(model.parameters(), lr=1e-9), log=tmp_path, **settings)
    given = []
    for _ in range(7):
        given.append(torch.randn(32, 6))
        stabilizer.backward(model(given[-1]).square().mean())
        stabilizer.step()
    stabilizer.log.close()
    rows = [row for row in sf.load_run(tmp_path).layers.to_pylist() if row["activation_std"] is not None]
    return model, given, rows


@pytest.mark.parametrize("decide_on", ["host", "device"])
def test_the_rows_of_a_module_tell_what_its_outputs_were_like(tmp_path, decide_on):
    model, given, rows = saturating(tmp_path, decide_on=decide_on)
    assert sorted({row["step"] for row in rows}) == [1, 2, 3, 5]
    with torch.no_grad():
        linear = model[0](given[5])
    tanh = linear.tanh()
    found = {row["layer"]: row for row in rows if row["step"] == 5}
    assert found["0"]["activation_mean"] == pytest.approx(linear.mean().item(), rel=1e-4)
    assert found["0"]["activation_std"] == pytest.approx(linear.std(correction=0).item(), rel=1e-4)
    assert found["0"]["activation_largest"] == pytest.approx(linear.abs().max().item(), rel=1e-4)
    assert found["0"]["saturated_share"] is None
    assert found["1"]["saturated_share"] == pytest.approx((tanh.abs() >= 0.99).float().mean().item(), abs=1e-3)
    assert found["1"]["saturated_share"] > 0.5


def test_activations_can_be_left_out_and_sampled_more_often(tmp_path):
    assert saturating(tmp_path / "off", watch=sf.LayerMetrics(activations=False))[2] == []
    every = saturating(tmp_path / "all", watch=sf.LayerMetrics(sample_every_steps=1))[2]
    assert sorted({row["step"] for row in every}) == [1, 2, 3, 4, 5, 6]
