"""A data loading worker that is killed costs no step that was complete: the checkpoint is there, the run goes on."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import surefoot as sf

if TYPE_CHECKING:
    from pathlib import Path

ROWS = 48


class Fragile(Dataset):
    """Rows of random numbers. The worker that first loads a certain row is killed, if there is a file that says so."""

    def __init__(self, order: Path) -> None:
        self.order = order

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> torch.Tensor:
        if row == 40 and self.order.exists():
            self.order.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        generator = torch.Generator().manual_seed(row)
        return torch.rand(4, generator=generator)


def train(folder: Path, order: Path) -> tuple[nn.Module, sf.TrainingStabilizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(Fragile(order), batch_size=2, num_workers=2, generator=torch.Generator().manual_seed(1))
    with sf.CheckpointManager(folder, every_steps=1_000) as checkpoints, sf.RunLog(folder / "log") as log:
        stabilizer = sf.TrainingStabilizer(model, optimizer, checkpoints=checkpoints, log=log)
        for batch in stabilizer.resume(loader):
            stabilizer.backward((model(batch) - batch.sum(1, keepdim=True)).square().mean())
            stabilizer.step()
            train.steps = stabilizer.steps
    return model, stabilizer


def test_a_worker_that_is_killed_costs_no_complete_step(tmp_path):
    order = tmp_path / "order"
    clean, _ = train(tmp_path / "clean", order)
    order.touch()
    with pytest.raises(RuntimeError, match="DataLoader worker"):
        train(tmp_path / "run", order)
    complete = train.steps
    assert 0 < complete < ROWS // 2
    with sf.CheckpointManager(tmp_path / "run") as checkpoints:
        assert [found.step for found in checkpoints.checkpoints()] == [complete]
    model, stabilizer = train(tmp_path / "run", order)
    assert stabilizer.steps == ROWS // 2
    for name, value in clean.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    (event,) = [each for each in sf.load_run(tmp_path / "run" / "log").events if each.cause == "data.worker-died"]
    assert (event.severity, event.step) == ("error", complete - 1)
    assert "was killed by a signal (Killed); the checkpoint of step" in event.summary
