"""Runs that go on with another number of ranks, or after one was killed; `test_elastic.py` starts them and looks."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import surefoot as sf
from mesh_scenarios import batch, spread, whole
from rank_scenarios import digest_of

if TYPE_CHECKING:
    from pathlib import Path


def killed(rank: int, folder: Path, kind: str, at: int = -1) -> Any:
    """A run of twelve steps on any mesh; at one of them rank 1 is killed."""
    model, share, shares = spread(kind)
    torch.manual_seed(10 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    checkpoints = sf.CheckpointManager(folder / "run", every_steps=4)
    stabilizer = sf.TrainingStabilizer(model, optimizer, clip=sf.ClipByNorm(1.0), checkpoints=checkpoints)
    first = None
    for step in stabilizer.resume(range(12)):
        first = step if first is None else first
        if step == at and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        x, y = batch(step, share, shares)
        stabilizer.backward((model(x) - y).square().mean() * (1 + 0.01 * float(torch.rand(()))))
        stabilizer.step()
        checkpoints.wait()  # what happens next finds it on the disk, however slow that is
    state = [whole(list(model.parameters())), whole(optimizer.state_dict())]
    return {"first": first, "state": digest_of(state), "streams": digest_of(torch.get_rng_state())}


def share_rows(rank: int, folder: Path, stop: int = 100, accumulate: int = 1, batch_size: int = 4) -> Any:
    """Two epochs over 48 rows that the ranks share; gives the rows of every optimizer step, and the weights."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    checkpoints = sf.CheckpointManager(folder / "run", every_steps=4)
    stabilizer = sf.TrainingStabilizer(model, optimizer, accumulate=accumulate, checkpoints=checkpoints)
    x = torch.randn(48, 6, generator=torch.Generator().manual_seed(1)).double()
    data = TensorDataset(torch.arange(48), x, x.sum(1, keepdim=True).sin())
    sampler = DistributedSampler(data, shuffle=True, seed=3)
    loader = DataLoader(data, batch_size=batch_size, sampler=sampler)
    rows: dict[int, list[int]] = {}
    try:
        for epoch in stabilizer.epochs(2):
            sampler.set_epoch(epoch)
            for index, x, y in stabilizer.resume(loader):
                rows.setdefault(stabilizer.steps, []).extend(index.tolist())
                stabilizer.backward((model(x) - y).square().mean())
                stabilizer.step()
                checkpoints.wait()
                if stabilizer.steps >= stop:
                    return None
    except sf.CheckpointError as error:
        return str(error)
    weights = [value for parameter in model.parameters() for value in parameter.detach().flatten().tolist()]
    return {"rows": rows, "weights": weights, "accumulate": stabilizer._run.window.sums.length}
