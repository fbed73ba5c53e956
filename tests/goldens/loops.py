"""Tiny training loops, one for each feature that leaves something of its own in a checkpoint.

Weights, data and learning rates are small binary fractions, so that most numbers come out the same on every processor.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import surefoot as sf
from surefoot.core.random_state import read_streams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

ROWS, BATCH = 8, 2
EPOCHS = 3


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def linear() -> nn.Module:
    """Two weights and a bias."""
    return _filled(nn.Linear(2, 1))


def several_dtypes() -> nn.Module:
    """Buffers, a counter that is whole, and weights of three dtypes."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    model.register_parameter("weight_bf16", nn.Parameter(torch.zeros(2, dtype=torch.bfloat16)))
    model.register_parameter("weight_f64", nn.Parameter(torch.zeros(2, dtype=torch.float64)))
    return _filled(model)


def _filled(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            values = torch.arange(parameter.numel(), dtype=torch.float64) - number
            parameter.copy_((values / 4).reshape(parameter.shape))
    return model


def rows(odd: float | None = None) -> TensorDataset:
    """Numbers from 0 to 15; with `odd`, one in the second half of the rows that is something else."""
    x = torch.arange(2.0 * ROWS).reshape(ROWS, 2) / 4
    if odd is not None:
        x[ROWS // 2 :, 0] = odd
    return TensorDataset(x, torch.arange(ROWS))


def in_order(odd: float | None = None) -> DataLoader[Any]:
    return DataLoader(rows(odd), BATCH)


def shuffled() -> DataLoader[Any]:
    return DataLoader(rows(), BATCH, shuffle=True)


def shuffled_by_own_generator() -> DataLoader[Any]:
    return DataLoader(rows(), BATCH, shuffle=True, generator=torch.Generator().manual_seed(5))


def shuffled_by_worker() -> DataLoader[Any]:
    return DataLoader(rows(), BATCH, shuffle=True, num_workers=1, persistent_workers=True)


class Loop:
    """One process of a run: everything is built when it begins."""

    def __init__(self, feature: Feature, folder: Path) -> None:
        seed_all(0)
        self.model = feature.model()
        self.optimizer = feature.optimizer(self.model.parameters())
        self.scheduler = None if feature.scheduler is None else feature.scheduler(self.optimizer)
        self.loader = feature.loader()
        self.also: dict[str, Any] = feature.also()
        self.feature = feature
        self.stabilizer = sf.TrainingStabilizer(
            self.model,
            self.optimizer,
            scheduler=self.scheduler,
            also_save={name: each for name, each in self.also.items() if not name.startswith("_")},
            checkpoints=sf.CheckpointManager(folder, every_steps=None),
            **{name: make() for name, make in feature.settings.items()},
        )

    def batches(self) -> Iterator[list[Tensor]]:
        """Every batch that is left, over all epochs."""
        if not self.feature.epoch_loop:
            yield from self.stabilizer.resume(self.loader, EPOCHS)
            return
        for _ in self.stabilizer.epochs(EPOCHS):
            yield from self.stabilizer.resume(self.loader)

    def loss(self, x: Tensor) -> Tensor:
        extra = sum(
            getattr(self.model, name).float().sum()
            for name in ("weight_bf16", "weight_f64")
            if hasattr(self.model, name)
        )
        return self.model(x).mean() + extra

    def step(self, batch: list[Tensor]) -> None:
        x, _ = batch
        if self.stabilizer.steps == self.feature.damage_at:
            with torch.no_grad():
                next(self.model.parameters()).fill_(torch.nan)
        for other in (each for each in self.also.values() if isinstance(each, sf.TrainingStabilizer)):
            other.backward(self.also["_critic"](x).mean())
            other.step()
        if self.feature.signals:
            self.stabilizer.observe(kl=float(self.stabilizer.steps) / 4)
        self.stabilizer.backward(self.loss(x), weight=len(x) if "accumulate" in self.feature.settings else None)
        self.stabilizer.step()

    def train_and_save(self) -> None:
        """Train for as many batches as the feature needs, save, and stop."""
        for number, batch in enumerate(self.batches(), 1):
            self.step(batch)
            if number == self.feature.batches:
                self.stabilizer.save()
                return

    def state(self) -> dict[str, Any]:
        """Everything of the run, in the form in which a checkpoint has it."""
        return {
            "models": [self.model.state_dict()],
            "optimizer": self.optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "also": {name: each.state_dict() for name, each in self.also.items() if not name.startswith("_")},
            "stabilizer": self.stabilizer.state_dict(),
            "streams": read_streams(),
        }


@dataclass(frozen=True)
class Feature:
    """How the loop of one feature differs from the plain one."""

    model: Callable[[], nn.Module] = linear
    optimizer: Callable[[Any], Any] = lambda parameters: torch.optim.SGD(parameters, lr=0.25)
    scheduler: Callable[[Any], Any] | None = None
    loader: Callable[[], DataLoader[Any]] = in_order
    also: Callable[[], dict[str, Any]] = dict
    settings: dict[str, Callable[[], Any]] = field(default_factory=dict)
    batches: int = 5
    """How many are trained on before the checkpoint is saved: one more than a pass has."""
    epoch_loop: bool = False
    damage_at: int | None = None
    """A step before which a weight becomes NaN, so that the run returns to a snapshot."""
    signals: bool = False


def _critic() -> dict[str, Any]:
    critic = linear()
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.125, momentum=0.5)
    return {"critic": sf.TrainingStabilizer(critic, optimizer, clip=sf.ClipByNorm(1.0)), "critic_model": critic} | {
        "critic_optimizer": optimizer,
        "_critic": critic,
    }


FEATURES: dict[str, Feature] = {
    "plain": Feature(),
    "moments": Feature(optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.125, amsgrad=True)),
    "dtypes": Feature(several_dtypes, lambda parameters: torch.optim.SGD(parameters, lr=0.25, momentum=0.5)),
    "scheduler": Feature(scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)),
    "warmup": Feature(scheduler=lambda optimizer: sf.warmup_cosine(optimizer, warmup_steps=4, total_steps=12)),
    "loss_scaler": Feature(
        loader=lambda: in_order(odd=2.0**120), settings={"scaler": lambda: sf.DynamicLossScaler(growth_interval=2)}
    ),
    "grad_scaler": Feature(
        loader=lambda: in_order(odd=2.0**120),
        settings={"scaler": lambda: torch.amp.GradScaler("cpu", growth_interval=2)},
    ),
    "accumulation_half_way": Feature(settings={"accumulate": lambda: 3}),
    "clipper": Feature(settings={"clip": lambda: sf.ClipByZScore(warmup_steps=2)}, signals=True),
    "skipped": Feature(loader=lambda: in_order(odd=float("nan"))),
    "recovery": Feature(settings={"recovery": lambda: sf.TrainingRecovery(every_steps=1)}, damage_at=3),
    "data_position": Feature(loader=shuffled_by_own_generator, epoch_loop=True, batches=6),
    "data_shuffled": Feature(loader=shuffled, batches=6),
    "data_worker": Feature(loader=shuffled_by_worker, batches=6),
    "two_models": Feature(also=_critic),
}
