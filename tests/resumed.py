"""A run that can be stopped and built anew, and what must be the same afterwards as if it had not been."""

from __future__ import annotations

import random
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import surefoot as sf
from surefoot.core.random_state import read_streams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

ROWS, BATCH, WIDTH = 26, 4, 6
PASS = -(-ROWS // BATCH)


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 12), nn.BatchNorm1d(12), nn.GELU(), nn.Dropout(0.3), nn.Linear(12, 1))


def data(dtype: torch.dtype = torch.float32) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(ROWS, WIDTH, generator=generator, dtype=dtype)
    return TensorDataset(x, x[:, :1].square())


def shuffled(workers: int = 0, **options: Any) -> DataLoader[Any]:
    return DataLoader(data(), BATCH, shuffle=True, num_workers=workers, **options)


class Stop(BaseException):
    """The process ends here."""


class Run:
    """One process: everything is built when it begins, and most tests change one part of it."""

    def __init__(self, folder: Path, **parts: Any) -> None:
        take = parts.pop
        self.epochs: int = take("epochs", 3)
        self.weights: bool = take("weights", False)
        self.model: nn.Module = take("model", net)()
        make: Callable[[Any], Any] = take("optimizer", lambda p: torch.optim.AdamW(p, lr=1e-2))
        self.optimizer = make(self.model.parameters())
        scheduler = take("scheduler", None)
        self.scheduler = None if scheduler is None else scheduler(self.optimizer)
        self.loader: Iterable[Any] = take("loader", shuffled)()
        self.also: dict[str, Any] = take("also", lambda run: {})(self)
        settings = {name: make() if callable(make) else make for name, make in parts.items()}
        self.stabilizer = sf.TrainingStabilizer(
            self.model,
            self.optimizer,
            scheduler=self.scheduler,
            also_save=self.also,
            checkpoints=sf.CheckpointManager(folder, every_steps=settings.pop("every_steps", None)),
            **settings,
        )
        self.seen = 0
        self.losses: list[float] = []

    def batches(self) -> Iterable[Any]:
        return self.stabilizer.resume(self.loader, epochs=self.epochs)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(self.model(x).float(), y.float())

    def step(self, batch: Any) -> None:
        with self.stabilizer.autocast():
            loss = self.loss(batch)
        self.stabilizer.backward(loss, weight=len(batch[0]) if self.weights else None)
        self.losses.append(float(loss.detach()))
        self.stabilizer.step()

    def train(self, stop: int | None = None) -> None:
        for batch in self.batches():
            self.step(batch)
            self.seen += 1
            if self.seen == stop:
                self.stabilizer.save()
                raise Stop

    def state(self) -> dict[str, Any]:
        """Everything that must be the same."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "also": {name: thing.state_dict() for name, thing in self.also.items()},
            "stabilizer": self.stabilizer.state_dict(),
            "streams": read_streams(),
        }


def interrupted(folder: Path, stops: Iterable[int], kind: type[Run] = Run, **parts: Any) -> tuple[list[float], Any]:
    """Losses and final state of a run that is stopped after so many batches, each time counted anew."""
    losses: list[float] = []
    for life, stop in enumerate((*stops, None)):
        seed_all(life * 1_000)  # whatever is not restored comes out differently
        run = kind(folder, **parts)
        if stop is None:
            run.train()
        else:
            try:
                run.train(stop)
            except Stop:
                pass
            else:
                raise AssertionError(f"the run ended before {stop} batches")
            if run.stabilizer._run.persistence.checkpoints is not None:
                run.stabilizer._run.persistence.checkpoints.wait()  # a process that is gone writes no more
        losses += run.losses
    return losses, run.state()


def check_resume(folder: Path, stops: Iterable[int] = (9,), kind: type[Run] = Run, **parts: Any) -> Any:
    """Stopped and taken up again, a run ends bit for bit where it ends undisturbed; gives that state."""
    expected_losses, expected = interrupted(folder / "undisturbed", (), kind, **parts)
    losses, state = interrupted(folder / "stopped", stops, kind, **parts)
    found = differences(losses, expected_losses, "losses") + differences(state, expected)
    assert not found, found[:20]
    return expected


def differences(one: Any, other: Any, path: str = "") -> list[str]:
    """The places at which two states are not the same, bit for bit."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape and _bits(one) == _bits(other)
        return [] if same else [path]
    if type(one) is not type(other) and not (isinstance(one, dict) and isinstance(other, dict)):
        return [f"{path}: {one!r} and {other!r}"]
    if isinstance(one, (dict, OrderedDict)):
        lacking = [f"{path}.{key}" for key in {*one} ^ {*other}]
        return lacking + [d for key in one if key in other for d in differences(one[key], other[key], f"{path}.{key}")]
    if isinstance(one, (list, tuple)):
        if len(one) != len(other):
            return [f"{path}: {len(one)} and {len(other)} entries"]
        return [d for i, (a, b) in enumerate(zip(one, other, strict=True)) for d in differences(a, b, f"{path}.{i}")]
    same = repr(one) == repr(other) if isinstance(one, float) else one == other
    return [] if same else [f"{path}: {one!r} and {other!r}"]


def _bits(tensor: Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
