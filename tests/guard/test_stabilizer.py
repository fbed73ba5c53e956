"""The stabilizer in a real loop: what is refused, what is applied, what the person is told."""

from __future__ import annotations

import copy
import inspect
import logging
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import surefoot as sf
from loops import OPTIMIZERS, batches, built, differences, everything

NAN, INF = math.nan, math.inf


def guarded(optimizer: str = "fused adamw", model: str = "mlp", **settings: Any) -> tuple[Any, Any, Any]:
    net, opt = built(model, optimizer)
    return net, opt, sf.TrainingStabilizer(net, opt, **settings)


def step(net: nn.Module, opt: Any, stabilizer: Any, batch: tuple[Tensor, Tensor], factor: float = 1.0) -> sf.Outcome:
    """One step of the loop; `factor` spoils the loss."""
    x, y = batch

    def closure() -> Tensor:
        if isinstance(opt, torch.optim.LBFGS):
            opt.zero_grad()
        with stabilizer.autocast():
            loss = F.cross_entropy(net(x), y) * factor
        stabilizer.backward(loss)
        return loss

    if isinstance(opt, torch.optim.LBFGS):
        return stabilizer.step(closure)
    closure()
    return stabilizer.step()


def same_but_for_empty_state(before: dict[str, Tensor], after: dict[str, Tensor]) -> bool:
    """Bitwise the same, where state that did not exist may exist now as long as it is all zero."""
    created = after.keys() - before.keys()
    untouched = all(bool((after[name] == 0).all()) for name in created)
    return untouched and differences(before, {name: after[name] for name in before}) == []


# ---- skipping -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decide_on", ["host", "device"])
@pytest.mark.parametrize("factor", [NAN, INF])
@pytest.mark.parametrize("bad_step", [0, 4])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_skipped_step_is_bitwise_no_step_and_the_next_one_is_applied(optimizer, bad_step, factor, decide_on):
    net, opt, stabilizer = guarded(optimizer, decide_on=decide_on)
    net.eval()  # dropout off: the forward pass is the same each time
    for i, batch in enumerate(batches(7, fixed=optimizer == "lbfgs")):
        before = everything(net, opt)
        outcome = step(net, opt, stabilizer, batch, factor if i == bad_step else 1.0)
        after = everything(net, opt)
        if i == bad_step:
            assert outcome.skipped
            assert outcome.reasons == ("nonfinite",)
            assert same_but_for_empty_state(before, after)
        else:
            assert outcome.applied
            assert differences(before, after) != []
    assert stabilizer.counts["skipped"] == 1
    assert all(bool(torch.isfinite(p).all()) for p in net.parameters())


@pytest.mark.parametrize("optimizer", ["fused adamw", "adamw", "sgd with momentum"])
def test_a_run_with_one_broken_batch_ends_where_a_run_without_that_batch_ends(optimizer):
    def train(with_broken: bool) -> dict[str, Tensor]:
        net, opt, stabilizer = guarded(optimizer)
        net.eval()
        for i, batch in enumerate(batches(30)):
            if i == 12 and not with_broken:
                continue
            step(net, opt, stabilizer, batch, NAN if i == 12 else 1.0)
        return everything(net, opt)

    assert differences(train(True), train(False)) == []


def test_one_broken_microbatch_keeps_the_whole_window_out_of_the_weights():
    net, opt, stabilizer = guarded(accumulate=4)
    stream = batches(12)
    for i, batch in enumerate(stream):
        before = everything(net, opt)
        outcome = step(net, opt, stabilizer, batch, NAN if i == 5 else 1.0)
        if (i + 1) % 4:
            assert outcome.accumulating
            assert not outcome.applied
            assert differences(before, everything(net, opt)) == []
    assert [record.skipped for record in stabilizer.history] == [False, True, False]


def test_a_gradient_explosion_never_reaches_the_weights():
    net, opt, stabilizer = guarded("sgd with momentum")
    for i, batch in enumerate(batches(60)):
        before = everything(net, opt)
        outcome = step(net, opt, stabilizer, batch, 1e6 if i == 40 else 1.0)
        if i == 40:
            assert outcome.skipped
            assert outcome.reasons[0] == "explosion"
            assert differences(before, everything(net, opt)) == []
    assert stabilizer.counts["skipped"] == 1
    assert "times its recent median" in stabilizer.incidents[0].summary


def test_an_explosion_beyond_fp32_is_refused_from_the_first_step():
    net, opt, stabilizer = guarded("sgd with momentum")
    outcome = step(net, opt, stabilizer, next(batches(1)), 3e38)
    assert outcome.skipped


def test_a_step_refused_by_a_rule_does_not_enter_the_clippers_history():
    net, opt, stabilizer = guarded(clip=sf.AdaptiveGradientClipper())
    for i, batch in enumerate(batches(60)):
        before = copy.deepcopy(stabilizer.state_dict()["policy"]["clip"])
        outcome = step(net, opt, stabilizer, batch, 1e6 if i == 50 else 1.0)
        assert (stabilizer.state_dict()["policy"]["clip"] == before) == outcome.skipped


def test_an_optimizer_with_a_closure_that_ends_on_broken_weights_is_taken_back():
    net, opt, stabilizer = guarded("lbfgs")
    net.eval()
    (x, y), *_ = batches(1, fixed=True)
    evaluations = 0

    def closure() -> Tensor:
        nonlocal evaluations
        evaluations += 1
        opt.zero_grad()
        loss = F.cross_entropy(net(x), y) * (NAN if evaluations > 1 else 1.0)
        stabilizer.backward(loss)
        return loss

    before = everything(net, opt)
    outcome = stabilizer.step(closure)
    assert evaluations > 1
    assert outcome.skipped
    assert differences(before, everything(net, opt)) == []


# ---- precision ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decide_on", ["host", "device"])
def test_an_fp16_overflow_costs_a_step_and_lowers_the_scale_and_is_no_incident(decide_on):
    net, opt, stabilizer = guarded(precision="fp16", scaler=sf.DynamicLossScaler(2.0**24), decide_on=decide_on)
    for batch in batches(40):
        step(net, opt, stabilizer, batch)
    counts = stabilizer.counts
    assert counts["overflows"] == counts["skipped"] > 0
    assert counts["applied"] > 0
    assert counts["alarms"] == 0
    assert stabilizer.history[-1].signals.loss_scale < 2.0**24


def test_a_broken_loss_does_not_lower_the_scale():
    net, opt, stabilizer = guarded(precision="fp16")
    scales = []
    for i, batch in enumerate(batches(20)):
        step(net, opt, stabilizer, batch, NAN if i == 15 else 1.0)
        scales.append(stabilizer.history[-1].signals.loss_scale)
    assert scales[16] == scales[15]
    assert stabilizer.incidents[0].kind == "nonfinite"


def test_a_scale_stuck_at_its_floor_is_reported():
    class Overflows(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * INF

    net, _opt, stabilizer = guarded(precision="fp16", scaler=sf.DynamicLossScaler(4.0, floor=1.0), escalation=None)
    for x, y in batches(6):
        stabilizer.backward(Overflows.apply(F.cross_entropy(net(x), y)))
        stabilizer.step()
    assert [incident.kind for incident in stabilizer.incidents] == ["precision.scaler-stuck"] * 4
    assert "loss scale 1" in stabilizer.incidents[0].summary


def test_clipping_sees_unscaled_gradients():
    norms = {}
    for precision in ("fp32", "fp16"):
        net, opt, stabilizer = guarded("sgd with momentum", precision=precision, clip=sf.ClipByNorm(0.1))
        net.eval()
        for batch in batches(12):
            step(net, opt, stabilizer, batch)
        norms[precision] = next(r.signals.grad_norm for r in stabilizer.history if not r.skipped)
    assert norms["fp16"] == pytest.approx(norms["fp32"], rel=0.02)


def test_clipping_scaled_gradients_outside_the_stabilizer_is_noticed():
    net, _opt, stabilizer = guarded(precision="fp16")
    for x, y in batches(5):
        stabilizer.backward(F.cross_entropy(net(x), y))
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        stabilizer.step()
    assert [incident.kind for incident in stabilizer.incidents] == ["clip.before-unscale"]


def test_accumulating_with_a_scaler_is_not_taken_for_clipping_outside():
    net, opt, stabilizer = guarded(precision="fp16", accumulate=3)
    for batch in batches(9):
        step(net, opt, stabilizer, batch)
    assert stabilizer.incidents == []


def test_a_grad_scaler_of_torchs_own_is_driven_like_torch_drives_it():
    def train(guard: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
        net, opt = built("mlp", "fused adamw")
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=7)
        stabilizer = sf.TrainingStabilizer(net, opt, precision="fp16", scaler=scaler) if guard else None
        for x, y in batches(60):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.cross_entropy(net(x), y)
            if stabilizer is not None:
                stabilizer.backward(loss)
                stabilizer.step()
                continue
            opt.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
        return everything(net, opt), scaler.state_dict()

    (bare, bare_scaler), (guarded_run, guarded_scaler) = train(False), train(True)
    assert differences(bare, guarded_run) == []
    assert bare_scaler == guarded_scaler


# ---- what the person is told --------------------------------------------------------------------------------------


def test_the_first_broken_tensor_is_the_one_nearest_the_loss_whatever_the_order_of_registration():
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.first = nn.Linear(8, 2), nn.Linear(4, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.relu(self.first(x)))

    net = Backwards()
    stabilizer = sf.TrainingStabilizer(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for i in range(4):
        out = net(torch.randn(3, 4))
        if i == 3:
            out.register_hook(lambda grad: grad * NAN)
        stabilizer.backward(out.square().mean())
        stabilizer.step()
    (incident,) = stabilizer.incidents
    assert incident.step == 3
    assert incident.evidence["first"].startswith("last.")
    assert incident.evidence["nonfinite"] == {"last.weight": 16, "last.bias": 2, "first.weight": 32, "first.bias": 8}


def test_an_incident_is_logged_with_step_tensor_and_numbers(caplog):
    net, opt, stabilizer = guarded()
    with caplog.at_level(logging.WARNING, "surefoot"):
        for i, batch in enumerate(batches(5)):
            step(net, opt, stabilizer, batch, NAN if i == 3 else 1.0)
    assert len(caplog.records) == 1
    message = caplog.records[0].getMessage()
    assert "step 3" in message
    assert "gradient of 3.bias and 3 more" in message
    assert "step skipped" in message


def test_a_flood_of_incidents_is_counted_and_not_logged_one_by_one(caplog):
    net, opt, stabilizer = guarded(escalation=None)
    with caplog.at_level(logging.WARNING, "surefoot"):
        for batch in batches(60):
            step(net, opt, stabilizer, batch, NAN)
    assert len(caplog.records) == 20
    assert stabilizer.counts["alarms"] == 60


def test_outcome_and_summary_show_each_layer():
    net, opt, stabilizer = guarded(clip=sf.ClipByNorm(0.01))
    for batch in batches(3):
        outcome = step(net, opt, stabilizer, batch)
    assert outcome.clipped
    rows = list(outcome.layers.rows())
    assert [row["name"] for row in rows] == ["0.weight", "0.bias", "3.weight", "3.bias"]
    assert outcome.grad_norm == pytest.approx(math.hypot(*(row["grad_norm"] for row in rows)), rel=1e-5)
    assert "3 steps, 3 applied, 0 skipped, 3 clipped" in stabilizer.summary()
    assert "0.weight" in stabilizer.summary()
    assert "applied" in repr(outcome)


def test_a_users_own_signal_is_watched_like_ours():
    net, opt, stabilizer = guarded()
    for i, batch in enumerate(batches(120)):
        stabilizer.observe(kl=torch.tensor(50.0 if i in (100, 101) else 0.1 + 0.01 * (i % 5)), entropy=1.0)
        step(net, opt, stabilizer, batch)
    assert [(incident.kind, incident.step) for incident in stabilizer.incidents] == [("signal.kl", 101)]
    assert stabilizer.history[-1].signals.extra == {"kl": pytest.approx(0.14), "entropy": 1.0}


def test_a_users_own_signal_that_is_nan_is_an_alarm_and_no_reason_to_skip():
    net, opt, stabilizer = guarded()
    for i, batch in enumerate(batches(6)):
        stabilizer.observe(kl=NAN if i == 4 else 0.1)
        assert step(net, opt, stabilizer, batch).applied
    assert [(incident.kind, incident.step) for incident in stabilizer.incidents] == [("signal.kl", 4)]


def test_numbers_decided_on_the_device_arrive_after_the_lag_and_are_the_same():
    def train(decide_on: str) -> list[tuple[Any, ...]]:
        net, opt, stabilizer = guarded(decide_on=decide_on, clip=sf.ClipByNorm(0.05))
        net.eval()
        for i, batch in enumerate(batches(20)):
            stabilizer.observe(own=torch.tensor(float(i)))
            step(net, opt, stabilizer, batch, NAN if i == 9 else 1.0)
        return [
            (
                *(r.signals.step, r.skipped, r.reasons, r.signals.lr, r.signals.extra["own"], r.signals.layers.names),
                *(f"{r.signals.get(name):.5g}" for name in ("loss", "grad_norm", "nonfinite", "clip_factor")),
            )
            for r in stabilizer.history
        ]

    assert train("host") == train("device")


# ---- escalation ---------------------------------------------------------------------------------------------------


def test_skips_then_cuts_then_a_halt_that_carries_the_incident():
    net, opt, stabilizer = guarded(escalation=sf.Escalation(skips=2, cuts=2, lr_factor=0.5))
    before = everything(net, opt)
    stream = batches(20)
    for batch in [next(stream) for _ in range(8)]:
        step(net, opt, stabilizer, batch, NAN)
    message = r"halted at step 8 .*non-finite values in the gradient of 3\.bias"
    with pytest.raises(sf.TrainingHalted, match=message) as e:
        step(net, opt, stabilizer, next(stream), NAN)
    assert e.value.incident.step == 8
    assert [incident.action for incident in stabilizer.incidents] == ["skip", "skip", "back_off"] * 2 + [
        "skip",
        "skip",
        "halt",
    ]
    assert same_but_for_empty_state(before, everything(net, opt))


def test_a_cut_lowers_the_step_and_leaves_the_schedule_as_it_is_and_calm_takes_it_back():
    net, opt = built("mlp", "sgd with momentum")
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 100)
    reference = torch.optim.lr_scheduler.CosineAnnealingLR(
        OPTIMIZERS["sgd with momentum"](built("mlp", "adamw")[0].parameters()), 100
    )
    reference.optimizer._opt_called = True
    stabilizer = sf.TrainingStabilizer(
        net, opt, scheduler=scheduler, escalation=sf.Escalation(skips=0, cuts=3, calm_steps=10)
    )
    for i, batch in enumerate(batches(50)):
        assert opt.param_groups[0]["lr"] == reference.get_last_lr()[0]
        step(net, opt, stabilizer, batch, NAN if i in (10, 11) else 1.0)
        reference.step()
    cuts = [
        round(record.signals.lr / (0.01 * (1 + math.cos(math.pi * record.signals.step / 100))), 6)
        for record in stabilizer.history
    ]
    assert cuts == [1.0] * 11 + [0.5] + [0.25] * 10 + [0.5] * 10 + [1.0] * 18


# ---- saving -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decide_on", ["host", "device"])
@pytest.mark.parametrize(
    "settings",
    [
        {"clip": sf.AdaptiveGradientClipper(warmup_steps=5)},
        {"clip": sf.ClipPerTensor(warmup_steps=5), "precision": "fp16"},
        {"clip": sf.ClipByQuantile(window_steps=16, warmup_steps=3), "accumulate": 2},
    ],
)
def test_a_saved_and_loaded_stabilizer_continues_exactly(settings, decide_on, tmp_path):
    def fresh() -> tuple[Any, Any, Any]:
        net, opt, stabilizer = guarded(decide_on=decide_on, **settings)
        net.eval()
        return net, opt, stabilizer

    net, opt, stabilizer = fresh()
    net2, opt2, restored = fresh()
    for i, batch in enumerate(batches(80)):
        factor = NAN if i in (20, 61) else 1.0
        stabilizer.observe(own=float(i % 7))
        step(net, opt, stabilizer, batch, factor)
        if i == 39:
            torch.save(stabilizer.state_dict(), tmp_path / "state.pt")
            net2.load_state_dict(net.state_dict())
            opt2.load_state_dict(copy.deepcopy(opt.state_dict()))
            restored.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        elif i > 39:
            restored.observe(own=float(i % 7))
            step(net2, opt2, restored, batch, factor)
    assert differences(everything(net, opt), everything(net2, opt2)) == []
    assert restored.counts == stabilizer.counts
    assert restored.steps == stabilizer.steps


def test_a_part_whose_settings_changed_starts_again_and_the_rest_continues():
    net, opt, stabilizer = guarded(clip=sf.AdaptiveGradientClipper())
    for batch in batches(30):
        step(net, opt, stabilizer, batch)
    _, _, other = guarded(clip=sf.AdaptiveGradientClipper(factor=3.0))
    other.load_state_dict(stabilizer.state_dict())
    assert other.state_dict()["policy"]["clip"]["seen"] == 0
    assert other.state_dict()["policy"]["rules"][1]["accepted"] == 30
    assert other.steps == 30


def test_a_state_of_another_schema_is_refused():
    _, _, stabilizer = guarded()
    with pytest.raises(sf.SettingError, match="schema 99"):
        stabilizer.load_state_dict({"schema": 99})


# ---- odd models ---------------------------------------------------------------------------------------------------


def test_sparse_gradients_are_clipped_and_guarded():
    torch.manual_seed(0)
    net = nn.Embedding(20, 4, sparse=True)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    stabilizer = sf.TrainingStabilizer(net, opt, clip=sf.ClipByNorm(0.5))
    before = net.weight.detach().clone()
    stabilizer.backward(net(torch.tensor([3, 3, 7])).sum() * 10)
    outcome = stabilizer.step()
    assert outcome.grad_norm == pytest.approx(math.sqrt(4 * (20**2 + 10**2)), rel=1e-5)
    assert float((net.weight.detach() - before).norm()) == pytest.approx(0.05, rel=1e-4)
    stabilizer.backward(net(torch.tensor([3])).sum() * NAN)
    assert stabilizer.step().skipped


def test_sparse_gradients_that_are_not_clipped_keep_the_bare_loops_bits():
    def train(guard: bool) -> Tensor:
        torch.manual_seed(0)
        net = nn.Embedding(50, 4, sparse=True)
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        stabilizer = sf.TrainingStabilizer(net, opt) if guard else None
        for _ in range(50):
            loss = net(torch.randint(50, (200,))).square().mean()
            if stabilizer is not None:
                stabilizer.backward(loss)
                stabilizer.step()
                continue
            opt.zero_grad()
            loss.backward()
            opt.step()
        return net.weight.detach()

    assert torch.equal(train(False), train(True))


def test_gradients_that_another_models_backward_left_are_not_applied():
    def train(guard: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        maker, critic = nn.Linear(2, 4), nn.Linear(4, 1)
        make_opt, judge_opt = (torch.optim.Adam(m.parameters(), fused=True) for m in (maker, critic))
        make, judge = sf.presets.for_gan(maker, make_opt, critic, judge_opt) if guard else (None, None)
        for _ in range(30):
            noise = torch.randn(8, 2)
            for opt, stabilizer, loss_of in (
                (judge_opt, judge, lambda noise=noise: critic(maker(noise).detach()).square().mean()),
                (make_opt, make, lambda noise=noise: -critic(maker(noise)).mean()),
            ):
                if stabilizer is not None:
                    stabilizer.backward(loss_of())
                    stabilizer.step()
                    continue
                opt.zero_grad()
                loss_of().backward()
                opt.step()
        return everything(nn.Sequential(maker, critic), judge_opt)

    assert differences(train(False), train(True)) == []


def test_a_first_reward_after_a_long_silence_is_learned_from():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 16))
    stabilizer = sf.TrainingStabilizer(net, torch.optim.Adam(net.parameters(), lr=1e-2), checker=sf.StabilityChecker())
    for _ in range(400):
        x = torch.randn(8, 4)
        policy = torch.distributions.Categorical(logits=net(x))
        action = policy.sample()
        reward = 10.0 * ((action == 3) & (x[:, 0] > 1.5))
        stabilizer.backward(-(policy.log_prob(action) * reward).mean() - 1e-3 * policy.entropy().mean())
        stabilizer.step()
    assert "explosion" not in {incident.kind for incident in stabilizer.incidents}
    assert stabilizer.counts["skipped"] <= 6


def test_parameters_without_a_gradient_are_left_alone_and_may_come_and_go():
    torch.manual_seed(0)
    net = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    opt = torch.optim.AdamW(net.parameters(), fused=True)
    stabilizer = sf.TrainingStabilizer(net, opt, clip=sf.ClipPerTensor(warmup_steps=2))
    for i in range(12):
        stabilizer.backward(net[i % 3](torch.randn(2, 4)).square().mean())
        outcome = stabilizer.step()
        assert outcome.layers.names == (f"{i % 3}.weight", f"{i % 3}.bias")
    assert stabilizer.counts["applied"] == 12


def test_layers_unfrozen_later_are_guarded_too():
    torch.manual_seed(0)
    body, head = nn.Linear(4, 4), nn.Linear(4, 2)
    net = nn.Sequential(body, head)
    opt = torch.optim.SGD(head.parameters(), lr=0.1)
    stabilizer = sf.TrainingStabilizer(net, opt, clip=sf.ClipPerTensor(warmup_steps=1))
    for i in range(6):
        if i == 3:
            opt.add_param_group({"params": list(body.parameters())})
        stabilizer.backward(net(torch.randn(2, 4)).square().mean())
        outcome = stabilizer.step()
    assert set(outcome.layers.names) == {"0.weight", "0.bias", "1.weight", "1.bias"}


def test_a_step_without_any_gradient_is_said_once_and_does_not_stop_the_run():
    net, _, stabilizer = guarded()
    for _ in range(3):
        stabilizer.step()
    assert [incident.kind for incident in stabilizer.incidents] == ["optim.no-gradient"]
    stabilizer.backward(net(torch.randn(4, 16)).square().mean())
    assert stabilizer.step().applied


def test_two_models_and_two_optimizers_are_two_stabilizers():
    torch.manual_seed(0)
    maker, critic = nn.Linear(2, 4), nn.Linear(4, 1)
    make = sf.TrainingStabilizer(maker, torch.optim.Adam(maker.parameters(), fused=True))
    judge = sf.TrainingStabilizer(critic, torch.optim.Adam(critic.parameters(), fused=True))
    for i in range(20):
        noise = torch.randn(8, 2)
        judge.backward(critic(maker(noise).detach()).square().mean() * (NAN if i == 5 else 1.0))
        judge.step()
        make.backward(-critic(maker(noise)).mean())
        make.step()
    assert judge.counts["skipped"] == 1
    assert make.counts["skipped"] == 0


def test_a_model_compiled_by_torch_keeps_its_names():
    net, opt = built("mlp", "fused adamw")
    compiled = torch.compile(net, backend="eager")
    stabilizer = sf.TrainingStabilizer(compiled, opt)
    x, y = next(batches(1))
    stabilizer.backward(F.cross_entropy(compiled(x), y))
    assert stabilizer.step().layers.names == ("0.weight", "0.bias", "3.weight", "3.bias")


def test_float64_models_are_measured_in_float64():
    net = nn.Linear(4, 1).double()
    stabilizer = sf.TrainingStabilizer(net, torch.optim.SGD(net.parameters(), lr=0.1), clip=sf.ClipByNorm(1e-3))
    stabilizer.backward(net(torch.randn(4, 4, dtype=torch.float64)).square().mean())
    assert stabilizer.step().applied


# ---- wrong use ----------------------------------------------------------------------------------------------------

WRONG_SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "accumulate 0": ({"accumulate": 0}, r"`accumulate` must be at least 1.*got 0"),
    "scaler with bf16": (
        {"precision": "bf16", "scaler": sf.DynamicLossScaler()},
        r"`scaler` is for fp16; got precision='bf16'.*remove the scaler",
    ),
    "unknown precision": ({"precision": "fp8"}, r"`precision` must be .*got 'fp8'"),
    "a number as clip": ({"clip": 1.0}, r"got the number 1\.0\. Write `clip=ClipByNorm\(1\.0\)`"),
    "a class as clip": ({"clip": sf.ClipByNorm}, r"`clip` takes clippers such as ClipByNorm\(1\.0\)"),
    "two clippers": ({"clip": (sf.ClipByNorm(1.0), sf.ClipByZScore())}, r"at most one clipper; got 2"),
    "shaper last": ({"clip": (sf.ClipByNorm(1.0), sf.CentralizeGradients())}, r"shapers must come before the clipper"),
    "unknown place": ({"decide_on": "gpu"}, r"`decide_on` must be 'auto', 'host' or 'device'; got 'gpu'"),
    "watch True": ({"watch": True}, r"`watch` must be a LayerMetrics; got True"),
    "escalation 3": ({"escalation": 3}, r"`escalation` must be an Escalation; got 3"),
    "a detector as checker": ({"checker": sf.NonFinite()}, r"`checker` must be a StabilityChecker; got NonFinite"),
    "negative lag": ({"lag_steps": -1}, r"`lag_steps` must not be negative; got -1"),
    "scheduler without step": ({"scheduler": 3}, r"`scheduler` has no `step`; got int"),
    "disabled scaler": (
        {"scaler": torch.amp.GradScaler("cpu", enabled=False)},
        r"the GradScaler is disabled.*pass no scaler",
    ),
}


@pytest.mark.parametrize("name", WRONG_SETTINGS)
def test_wrong_settings_say_what_was_got_and_the_way_out(name):
    settings, message = WRONG_SETTINGS[name]
    with pytest.raises(sf.SettingError, match=message):
        guarded(**settings)


def test_settings_of_parts_are_checked_where_they_are_written():
    with pytest.raises(sf.SettingError, match=r"`max_norm` must be positive; got -1"):
        sf.ClipByNorm(-1)
    with pytest.raises(sf.SettingError, match=r"`window_steps` must be at least 8 .*got 1\..* use `Explosion`"):
        sf.LossStabilityMonitor(window_steps=1)


def test_an_optimizer_of_another_model_is_refused():
    with pytest.raises(sf.SettingError, match=r"2 parameters do not belong to the model.*`model\.parameters\(\)`"):
        sf.TrainingStabilizer(nn.Linear(2, 2), torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))


def test_what_is_no_model_or_optimizer_is_refused():
    net = nn.Linear(2, 2)
    with pytest.raises(sf.SettingError, match=r"`model` must be a torch\.nn\.Module"):
        sf.TrainingStabilizer([3], torch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(sf.SettingError, match=r"`optimizer` has no `step`"):
        sf.TrainingStabilizer(net, net)


def test_schedulers_that_cannot_be_driven_are_refused():
    net, opt = built("mlp", "adamw")
    with pytest.raises(sf.SettingError, match=r"ReduceLROnPlateau.*call `scheduler\.step\(metric\)` yourself"):
        sf.TrainingStabilizer(net, opt, scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau(opt))
    _, other = built("mlp", "adamw")
    with pytest.raises(sf.SettingError, match="another optimizer"):
        sf.TrainingStabilizer(net, opt, scheduler=torch.optim.lr_scheduler.ConstantLR(other))


def test_losses_that_backward_cannot_run_on_are_refused():
    net, _, stabilizer = guarded()
    with pytest.raises(sf.UsageError, match=r"got float\. Pass the loss itself, not `loss\.item\(\)`"):
        stabilizer.backward(0.5)
    with pytest.raises(sf.UsageError, match=r"one number; got shape \(4, 5\)"):
        stabilizer.backward(net(torch.randn(4, 16)))
    with pytest.raises(sf.UsageError, match="no graph"):
        stabilizer.backward(net(torch.randn(4, 16)).mean().detach())


def test_an_optimizer_that_needs_a_closure_says_so():
    net, _, stabilizer = guarded("lbfgs")
    stabilizer.backward(net(torch.randn(4, 16)).square().mean())
    with pytest.raises(sf.UsageError, match=r"call `stabilizer\.step\(closure\)`"):
        stabilizer.step()


def test_steps_out_of_order_are_refused():
    net, _, stabilizer = guarded(precision="fp16")
    net(torch.randn(4, 16)).mean().backward()
    with pytest.raises(sf.UsageError, match=r"pass the loss to `stabilizer\.backward\(loss\)`"):
        stabilizer.step()
    _, _, stabilizer = guarded(accumulate=2)
    with pytest.raises(sf.UsageError, match="accumulate=1"):
        stabilizer.step(lambda: torch.zeros(()))


def test_weights_on_some_microbatches_only_are_refused():
    net, _, stabilizer = guarded(accumulate=2)
    stabilizer.backward(net(torch.randn(4, 16)).square().mean(), weight=4)
    with pytest.raises(sf.UsageError, match="pass it for all of them or for none"):
        stabilizer.backward(net(torch.randn(4, 16)).square().mean())


def test_a_signal_that_is_not_one_number_is_refused():
    _, _, stabilizer = guarded()
    with pytest.raises(sf.UsageError, match=r"signal 'kl' must be one number; got a tensor of shape \(3,\)"):
        stabilizer.observe(kl=torch.zeros(3))


def test_weights_that_are_broken_already_are_named_as_the_cause():
    net, opt, stabilizer = guarded()
    with torch.no_grad():
        net[3].weight[0, 0] = NAN
    step(net, opt, stabilizer, next(batches(1)))
    assert stabilizer.incidents[0].summary.startswith("the weights are not finite")


def test_a_gradient_whose_square_overflows_never_reaches_the_second_moment():
    net, opt, stabilizer = guarded("fused adamw")
    for i, batch in enumerate(batches(8)):
        step(net, opt, stabilizer, batch, 1e22 if i == 2 else 1.0)
    assert stabilizer.counts["skipped"] == 1
    assert all(bool(torch.isfinite(state["exp_avg_sq"]).all()) for state in opt.state.values())


@pytest.mark.parametrize("decide_on", ["host", "device"])
@pytest.mark.parametrize("fused", [False, True])
def test_a_step_beyond_a_limit_is_left_out_with_the_limit_in_its_message(decide_on, fused):
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=fused)
    checker = sf.StabilityChecker(max_grad_norm=50.0, max_grad_ratio=40.0, max_loss=500.0)
    stabilizer = sf.TrainingStabilizer(model, optimizer, checker=checker, decide_on=decide_on)
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.zero_()
    before = model.weight.detach().clone()
    stabilizer.backward(model(torch.full((2, 4), 6.0)).square().mean())  # a loss of 576
    stabilizer.step()
    assert torch.equal(model.weight, before)
    stabilizer.backward(model(torch.full((2, 4), 0.5)).square().mean())
    stabilizer.step()
    assert not torch.equal(model.weight, before)
    (incident,) = stabilizer.incidents
    assert incident.kind == "limit.grad_norm"
    assert "above the limit of 50; " in incident.summary
    assert "above the limit of 40 times the norm of the parameters" in incident.summary
    assert "the loss is 576, above the limit of 500" in incident.summary
    assert [record.skipped for record in stabilizer.history] == [True, False]


def test_the_repr_shows_every_setting_also_after_a_preset():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shown = repr(sf.TrainingStabilizer(model, optimizer, clip=sf.ClipByNorm(2.0), accumulate=3))
    assert shown.startswith("TrainingStabilizer(model=Linear, optimizer=SGD, scheduler=None, clip=ClipByNorm(max_norm")
    assert all(f"{name}=" in shown for name in inspect.signature(sf.TrainingStabilizer).parameters)
    assert "accumulate=3" in shown
    preset = repr(sf.presets.for_transformer(model, torch.optim.SGD(model.parameters(), lr=0.1), total_steps=100))
    assert "scheduler=LambdaLR, clip=ClipByNorm(max_norm=1.0)" in preset


def test_the_loss_scale_of_a_step_is_readable_from_its_outcome():
    for precision, scale in ((None, 1.0), ("fp16", 2.0**16)):
        model = torch.nn.Linear(2, 1)
        stabilizer = sf.TrainingStabilizer(model, torch.optim.SGD(model.parameters(), lr=0.1), precision=precision)
        stabilizer.backward(model(torch.ones(2, 2)).mean())
        assert stabilizer.step().loss_scale == scale
