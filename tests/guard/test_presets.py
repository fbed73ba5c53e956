"""Presets: each returns a stabilizer that trains, set the way its docstring says, and gives way to the user."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import surefoot as sf
from loops import batches, built

SINGLE = [
    sf.presets.for_transformer,
    sf.presets.for_fine_tuning,
    sf.presets.for_rnn,
    sf.presets.for_deep_cnn,
    sf.presets.for_rl,
]


@pytest.mark.parametrize("preset", SINGLE)
def test_a_preset_trains_and_refuses_a_broken_step(preset):
    net, opt = built("mlp", "fused adamw")
    stabilizer = preset(net, opt)
    for i, (x, y) in enumerate(batches(30)):
        stabilizer.backward(F.cross_entropy(net(x), y) * (float("nan") if i == 20 else 1.0))
        stabilizer.step()
    assert stabilizer.counts["skipped"] == 1
    assert stabilizer.history[-1].signals.loss < stabilizer.history[0].signals.loss


@pytest.mark.parametrize("preset", SINGLE)
def test_what_the_user_gives_wins_over_the_preset(preset):
    net, opt = built("mlp", "fused adamw")
    stabilizer = preset(net, opt, clip=sf.ClipByNorm(1e-4))
    x, y = next(batches(1))
    stabilizer.backward(F.cross_entropy(net(x), y))
    outcome = stabilizer.step()
    assert outcome.record.signals.clip_factor * outcome.grad_norm == pytest.approx(1e-4, rel=0.01)


@pytest.mark.parametrize(("preset", "warmup"), [(sf.presets.for_transformer, 4), (sf.presets.for_fine_tuning, 12)])
def test_a_total_brings_a_schedule_that_warms_up_and_ends_low(preset, warmup):
    net, opt = built("mlp", "fused adamw")
    peak = opt.param_groups[0]["lr"]
    stabilizer = preset(net, opt, total_steps=200)
    rates = []
    for x, y in batches(200):
        stabilizer.backward(F.cross_entropy(net(x), y))
        rates.append(stabilizer.step().record.signals.lr)
    assert rates[0] == pytest.approx(peak / warmup, rel=0.3)
    assert max(rates) == pytest.approx(peak)
    assert rates.index(max(rates)) in (warmup - 1, warmup)
    assert rates[-1] < 0.02 * peak


def test_a_gan_gets_two_stabilizers_that_do_not_judge_its_loss_curves():
    torch.manual_seed(0)
    maker, critic = nn.Linear(2, 2), nn.Linear(2, 1)
    make, judge = sf.presets.for_gan(
        maker, torch.optim.Adam(maker.parameters()), critic, torch.optim.Adam(critic.parameters())
    )
    for _ in range(300):
        noise = torch.randn(16, 2)
        judge.backward(F.softplus(critic(maker(noise).detach())).mean() + F.softplus(-critic(noise * 2 + 1)).mean())
        judge.step()
        make.backward(F.softplus(-critic(maker(noise))).mean())
        make.step()
    assert make.incidents == judge.incidents == []
    assert make.counts["applied"] == 300


def test_a_deep_cnn_whose_head_is_found_logs_nothing_about_the_names_it_may_have(caplog):
    net = nn.Sequential()
    net.add_module("features", nn.Linear(4, 4))
    net.add_module("fc", nn.Linear(4, 2))
    sf.presets.for_deep_cnn(net, torch.optim.SGD(net.parameters(), lr=1.0))
    assert caplog.records == []
    sf.presets.for_deep_cnn(net, torch.optim.SGD(net.parameters(), lr=1.0), head=("last.*",))
    assert "'last.*' matches no parameter" in caplog.text


def test_the_head_of_a_deep_cnn_is_not_clipped():
    torch.manual_seed(0)
    net = nn.Sequential()
    net.add_module("body", nn.Linear(4, 4))
    net.add_module("head", nn.Linear(4, 2))
    stabilizer = sf.presets.for_deep_cnn(net, torch.optim.SGD(net.parameters(), lr=1.0))
    before = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    stabilizer.backward(net(torch.randn(8, 4)).square().sum() * 100)
    stabilizer.step()
    moved = {n: float((p.detach() - before[n]).norm() / before[n].norm()) for n, p in net.named_parameters()}
    assert moved["body.weight"] <= 0.0101
    assert moved["head.weight"] > 1


@pytest.mark.parametrize("preset", [sf.presets.for_transformer, sf.presets.for_fine_tuning])
def test_a_preset_given_a_scheduler_leaves_the_rate_to_it(preset):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    preset(model, optimizer, total_steps=1_000, scheduler=scheduler)
    assert optimizer.param_groups[0]["lr"] == 1.0


@pytest.mark.parametrize("preset", [sf.presets.for_transformer, sf.presets.for_fine_tuning])
def test_a_preset_takes_a_run_of_one_step(preset):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    preset(model, optimizer, total_steps=1)
    assert optimizer.param_groups[0]["lr"] == 1.0


@pytest.mark.parametrize("decide_on", ["host", "device"])
def test_a_gan_is_saved_and_loaded_whole_with_steps_still_on_their_way(decide_on, tmp_path):
    def made():
        torch.manual_seed(0)
        maker, critic = nn.Linear(4, 4), nn.Linear(4, 1)
        optimizers = [torch.optim.AdamW(m.parameters(), fused=True) for m in (maker, critic)]
        judge = sf.TrainingStabilizer(critic, optimizers[1], decide_on=decide_on)
        checkpoints = sf.CheckpointManager(tmp_path, every_steps=5)
        return (
            (maker, critic),
            sf.TrainingStabilizer(
                maker, optimizers[0], decide_on=decide_on, checkpoints=checkpoints, also_save={"critic": judge}
            ),
            judge,
        )

    def step(models, *pair):
        for stabilizer in pair:
            stabilizer.backward(models[1](models[0](torch.randn(8, 4))).square().mean())
            stabilizer.step()

    models, make, judge = made()
    for _ in range(12):
        step(models, judge, make)
    make.save()
    again, make_again, judge_again = made()
    assert make_again.restore() == 12
    assert judge_again.counts == judge.counts
    step(models, judge, make)
    make_again.restore()
    step(again, judge_again, make_again)
    assert all(
        torch.equal(a, b)
        for m, n in zip(models, again, strict=True)
        for a, b in zip(m.parameters(), n.parameters(), strict=True)
    )


@pytest.mark.parametrize("with_checkpoints", [False, True])
def test_a_gan_is_clipped_each_model_by_a_clipper_of_its_own(tmp_path, with_checkpoints):
    def largest_step(**settings):
        torch.manual_seed(0)
        models = nn.Linear(4, 4), nn.Linear(4, 1)
        optimizers = [torch.optim.SGD(m.parameters(), lr=1.0) for m in models]
        if with_checkpoints:
            settings["checkpoints"] = sf.CheckpointManager(tmp_path / str(len(list(tmp_path.iterdir()))))
        pair = sf.presets.for_gan(models[0], optimizers[0], models[1], optimizers[1], **settings)
        for step in range(31):
            for model, stabilizer in zip(models, pair, strict=True):
                scale = 30.0 if step == 30 else 1.0  # the same gradient at every step but the last
                stabilizer.backward(scale * sum(p.sum() for p in model.parameters()))
                stabilizer.step()
        return [stabilizer.history[-1].signals.clip_factor for stabilizer in pair]

    assert largest_step() == [1.0, 1.0]
    assert largest_step(clip=sf.AdaptiveGradientClipper()) == [pytest.approx(2 / 30, rel=1e-3)] * 2
    assert largest_step(clip=sf.ClipByNorm(1e6), discriminator_clip=sf.ClipByNorm(1.0))[0] == 1.0
    assert largest_step(clip=sf.ClipByNorm(1e6), discriminator_clip=sf.ClipByNorm(1.0))[1] < 0.02
    adaptive = largest_step(clip=sf.AdaptiveGradientClipper(), discriminator_clip=None)
    assert adaptive == [pytest.approx(2 / 30, rel=1e-3), 1.0]
