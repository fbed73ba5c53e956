"""A run that was stopped and built anew ends bit for bit where it would have ended, whatever it is made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedules

import surefoot as sf
from resumed import PASS, WIDTH, Run, check_resume, net, shuffled

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

optim = torch.optim
STEPS = 3 * PASS


class WithFloatMoments(optim.Optimizer):
    """Half-precision parameters, moments in fp32: torch's own loading would cast those."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                state.update(average=torch.zeros_like(parameter, dtype=torch.float32), history=[], count=0)
            state["count"] += 1
            state["average"].lerp_(parameter.grad.float(), 0.1)
            state["history"] = [*state["history"][-2:], state["average"].norm()]
            parameter.sub_(0.01 * state["average"] / (1 + state["history"][0]))


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adamw": lambda p: optim.AdamW(p, lr=1e-2),
    "fused adamw": lambda p: optim.AdamW(p, lr=1e-2, fused=True),
    "adamw, rate as a tensor": lambda p: optim.AdamW(p, lr=torch.tensor(1e-2), capturable=False, foreach=False),
    "amsgrad": lambda p: optim.Adam(p, amsgrad=True),
    "sgd": lambda p: optim.SGD(p, lr=1e-2),
    "sgd with momentum": lambda p: optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "fused sgd with momentum": lambda p: optim.SGD(p, lr=1e-2, momentum=0.9, fused=True),
    "adagrad": lambda p: optim.Adagrad(p, lr=1e-2),
    "rmsprop": lambda p: optim.RMSprop(p, lr=1e-3, centered=True, momentum=0.5),
    "nadam": lambda p: optim.NAdam(p),
    "adafactor": lambda p: optim.Adafactor(p),
    "rprop": lambda p: optim.Rprop(p),
    "two groups": lambda p: (lambda ps: optim.AdamW([{"params": ps[:2]}, {"params": ps[2:], "lr": 1e-4}]))(list(p)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_continues_bitwise(tmp_path: Path, name: str) -> None:
    check_resume(tmp_path, optimizer=OPTIMIZERS[name])


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda o: schedules.LambdaLR(o, lambda step: 1 / (1 + step)),
    "cosine": lambda o: schedules.CosineAnnealingLR(o, STEPS),
    "one cycle": lambda o: schedules.OneCycleLR(o, 0.05, STEPS),
    "multi step": lambda o: schedules.MultiStepLR(o, [5, 12]),
    "sequential": lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o, 0.1, total_iters=6), schedules.CosineAnnealingLR(o, STEPS - 6)], [6]
    ),
    "chained": lambda o: schedules.ChainedScheduler(
        [schedules.ExponentialLR(o, 0.9), schedules.ConstantLR(o, 0.5, 12)]
    ),
    "warm restarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, 4, 2),
    "cyclic": lambda o: schedules.CyclicLR(o, 1e-3, 1e-2, 5, cycle_momentum=False),
    "polynomial": lambda o: schedules.PolynomialLR(o, STEPS),
    "warmup_constant": lambda o: sf.warmup_constant(o, 12),
    "warmup_linear": lambda o: sf.warmup_linear(o, 5, STEPS),
    "warmup_cosine": lambda o: sf.warmup_cosine(o, 5, STEPS, restarts=1),
    "warmup_step": lambda o: sf.warmup_step(o, 3, [6, 12]),
    "warmup_inverse_sqrt": lambda o: sf.warmup_inverse_sqrt(o, 5),
    "warmup_stable_decay": lambda o: sf.warmup_stable_decay(o, 3, STEPS, 12),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_continues_bitwise(tmp_path: Path, name: str) -> None:
    check_resume(tmp_path, scheduler=SCHEDULERS[name])


def test_a_scheduler_that_is_stepped_by_hand_continues_bitwise(tmp_path: Path) -> None:
    class ByHand(Run):
        def step(self, batch: Any) -> None:
            super().step(batch)
            self.also["plateau"].step(self.losses[-1])

    plateau = {"also": lambda run: {"plateau": schedules.ReduceLROnPlateau(run.optimizer, patience=1)}}
    state = check_resume(tmp_path, kind=ByHand, **plateau)
    assert state["optimizer"]["param_groups"][0]["lr"] < 1e-2


# ---- loss scaling -------------------------------------------------------------------------------------------------

SCALERS: dict[str, Callable[[], Any]] = {
    "ours": lambda: sf.DynamicLossScaler(initial_scale=2.0**19, growth_interval=4),
    "ours, slow": lambda: sf.DynamicLossScaler(initial_scale=2.0**10, growth_interval=7),
    "torch": lambda: torch.amp.GradScaler("cpu", init_scale=2.0**19, growth_interval=4),
}


@pytest.mark.parametrize("stop", [4, 5, 6, 11])
@pytest.mark.parametrize("name", SCALERS)
def test_a_loss_scale_continues_in_the_middle_of_its_growth(tmp_path: Path, name: str, stop: int) -> None:
    check_resume(tmp_path, (stop,), precision="fp16", scaler=SCALERS[name])


# ---- accumulation -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [8, 9, 10])
@pytest.mark.parametrize("weights", [False, True])
def test_a_window_of_microbatches_continues_in_its_middle(tmp_path: Path, weights: bool, stop: int) -> None:
    check_resume(tmp_path, (stop,), accumulate=3, weights=weights)


def test_a_window_continues_under_loss_scaling_and_clipping(tmp_path: Path) -> None:
    settings = {"precision": "fp16", "scaler": SCALERS["ours"], "clip": lambda: sf.ClipByNorm(0.1)}
    check_resume(tmp_path, (8,), accumulate=3, weights=True, **settings)


def test_two_losses_of_one_microbatch_survive_a_save_between_them(tmp_path: Path) -> None:
    class TwoLosses(Run):
        def step(self, batch: Any) -> None:
            self.stabilizer.backward(self.loss(batch))
            if self.seen == 4:
                self.stabilizer.save()
            self.stabilizer.backward(0.1 * self.loss(batch))
            self.losses.append(float(self.loss(batch).detach()))
            self.stabilizer.step()

    check_resume(tmp_path, (9,), kind=TwoLosses, accumulate=2)


# ---- parts with a memory ------------------------------------------------------------------------------------------

CLIPPERS: dict[str, Callable[[], Any]] = {
    "adaptive": lambda: sf.AdaptiveGradientClipper(warmup_steps=3, factor=1.1),
    "z-score": lambda: sf.ClipByZScore(0.5, warmup_steps=3),
    "quantile": lambda: sf.ClipByQuantile(0.5, window_steps=8, warmup_steps=3),
    "per tensor": lambda: sf.ClipPerTensor(warmup_steps=3),
    "shaped": lambda: [sf.CentralizeGradients(), sf.ClipByValue(0.5), sf.ClipByNorm(0.1)],
}


@pytest.mark.parametrize("decide_on", ["host", "device"])
@pytest.mark.parametrize("name", CLIPPERS)
def test_what_a_clipper_has_learned_continues(tmp_path: Path, name: str, decide_on: str) -> None:
    state = check_resume(tmp_path, clip=CLIPPERS[name], decide_on=decide_on, optimizer=OPTIMIZERS["fused adamw"])
    assert state["stabilizer"]["results"]["history"]["counts"]["clipped"] > 0


@pytest.mark.parametrize("every_steps", [None, 5])
@pytest.mark.parametrize("name", ["adamw", "fused adamw", "sgd with momentum"])
def test_steps_that_are_decided_on_the_device_go_on(tmp_path: Path, name: str, every_steps: int | None) -> None:
    settings = {"decide_on": "device", "lag_steps": 4, "every_steps": every_steps}
    check_resume(tmp_path, (12,), optimizer=OPTIMIZERS[name], **settings)


def test_an_average_of_the_weights_continues(tmp_path: Path) -> None:
    class Averaged(Run):
        def step(self, batch: Any) -> None:
            super().step(batch)
            self.also["average"].update_parameters(self.model)

    average = optim.swa_utils.get_ema_multi_avg_fn(0.9)
    also = {"also": lambda run: {"average": optim.swa_utils.AveragedModel(run.model, multi_avg_fn=average)}}
    check_resume(tmp_path, kind=Averaged, **also)


# ---- models -------------------------------------------------------------------------------------------------------


class Masked(nn.Module):
    """A causal mask, and slopes as ALiBi has them, both with entries that are infinite on purpose."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        mask = torch.full((WIDTH, WIDTH), float("-inf")).triu(1)
        self.register_buffer("causal", mask)
        self.register_buffer("slopes", mask - torch.arange(WIDTH * WIDTH).reshape(WIDTH, WIDTH).tril() / 10)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.inner(x)[:, :, None] * x[:, None, :]
        weights = (scores + self.causal).softmax(-1) + (scores + self.slopes).softmax(-1)
        return self.head((weights @ x[:, :, None])[:, :, 0])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x).relu()))


class InDtype(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner, self.dtype = net().to(dtype), dtype

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.to(self.dtype))


MODELS: dict[str, dict[str, Any]] = {
    "masks of -inf": {"model": Masked},
    "tied weights": {"model": Tied},
    "float64": {"model": lambda: InDtype(torch.float64)},
    "bf16 with moments in fp32": {"model": lambda: InDtype(torch.bfloat16), "optimizer": WithFloatMoments},
    "bf16 with adamw": {"model": lambda: InDtype(torch.bfloat16)},
    "bf16 autocast": {"precision": "bf16"},
}


@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_model_continues_bitwise(tmp_path: Path, name: str) -> None:
    check_resume(tmp_path, **MODELS[name])


def test_a_state_with_masks_of_minus_infinity_is_a_good_one(tmp_path: Path) -> None:
    run = Run(tmp_path, model=Masked)
    run.train()
    run.stabilizer.save()
    assert [found.good for found in sf.CheckpointManager(tmp_path).checkpoints()] == [True]


# ---- data ---------------------------------------------------------------------------------------------------------

LOADERS: dict[str, Callable[[], Any]] = {
    "no workers": lambda: shuffled(0),
    "two workers": lambda: shuffled(2),
    "two workers that are kept": lambda: shuffled(2, persistent_workers=True),
    "own generator": lambda: shuffled(0, generator=torch.Generator().manual_seed(3)),
}


@pytest.mark.parametrize("name", LOADERS)
def test_a_shuffling_loader_continues_with_the_next_batch(tmp_path: Path, name: str) -> None:
    check_resume(tmp_path, (5, 4), loader=LOADERS[name])


@pytest.mark.parametrize("stop", [1, PASS - 1, PASS, PASS + 1, 3 * PASS])
def test_it_may_stop_at_the_edges_of_a_pass(tmp_path: Path, stop: int) -> None:
    check_resume(tmp_path, (stop,))


def test_a_run_may_be_stopped_many_times(tmp_path: Path) -> None:
    check_resume(tmp_path, (1, 2, 3, 1, 1, 5, 1), accumulate=2, scheduler=SCHEDULERS["warmup_cosine"])


def test_a_loop_that_does_not_continue_its_checkpoints_is_warned_once(tmp_path, caplog):
    def train(first: int, continues: bool) -> None:
        model = nn.Linear(2, 1)
        manager = sf.CheckpointManager(tmp_path, every_steps=2)
        stabilizer = sf.TrainingStabilizer(model, torch.optim.SGD(model.parameters(), lr=0.1), checkpoints=manager)
        for _ in stabilizer.resume(range(first)) if continues else range(first):
            stabilizer.backward(model(torch.ones(1, 2)).mean())
            stabilizer.step()
        manager.wait()
        manager._claim.release()  # as if the process had ended

    train(4, continues=True)
    train(6, continues=True)
    assert "begins with step 0" not in caplog.text
    train(3, continues=False)
    assert caplog.text.count("has checkpoints up to step 6, but this run begins with step 0") == 1


def test_a_save_without_a_metric_is_ranked_by_the_mean_loss_of_the_last_steps(tmp_path):
    model = torch.nn.Linear(2, 1)
    checkpoints = sf.CheckpointManager(tmp_path)
    stabilizer = sf.TrainingStabilizer(model, torch.optim.SGD(model.parameters(), lr=0.0), checkpoints=checkpoints)
    for _ in range(3):
        loss = model(torch.ones(4, 2)).square().mean()
        stabilizer.backward(loss)
        stabilizer.step()
    stabilizer.save()
    (saved,) = checkpoints.checkpoints()
    assert saved.metric == pytest.approx(float(loss.detach()))
