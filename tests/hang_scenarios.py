"""What guarded ranks do when one of them leaves early; `guard/test_rank_watching.py` starts them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import surefoot as sf
from surefoot.errors import RankFailed

if TYPE_CHECKING:
    from pathlib import Path


def leave_early(rank: int, folder: Path, leaver: int, after: int) -> list[str]:
    """Train until one rank leaves; returns what the other is told, and what that was raised from."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 1))
    stabilizer = sf.TrainingStabilizer(model, torch.optim.SGD(model.parameters(), lr=0.01), log=folder / "run")
    for step in range(50):
        if rank == leaver and step == after:
            sys.exit(0)
        try:
            stabilizer.backward(model(torch.ones(2, 4)).square().mean())
            stabilizer.step()
        except RankFailed as error:
            return [str(error), str(error.__cause__)]
    return []
