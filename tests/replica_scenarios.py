"""What ranks do together over gloo while their replicas are checked; `guard/test_replica_check.py` starts them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import surefoot as sf
from counted import collectives_of

if TYPE_CHECKING:
    from pathlib import Path


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def spoil_one(rank: int, folder: Path, odd: int, at: int, kind: str, steps: int = 24) -> list[dict[str, Any]]:
    """Train; on one rank one number changes between two steps. Returns the alarms."""
    model = DistributedDataParallel(net())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    stabilizer = sf.TrainingStabilizer(model, optimizer, log=folder / "run")
    numbers = torch.Generator().manual_seed(rank)
    for step in range(steps):
        x = torch.randn(16, 6, generator=numbers)
        stabilizer.backward((model(x) - x[:, :1]).pow(2).mean())
        stabilizer.step()
        if step == at and rank == odd:
            weight = model.module[2].weight
            if kind == "parameters":  # the last bit
                weight.data.view(-1)[3] = torch.nextafter(weight.data.view(-1)[3], torch.tensor(9.0))
            else:
                optimizer.state[weight]["exp_avg"].view(-1)[3] += 1.0
    found = [event for event in stabilizer.incidents if event.kind == "dist.replicas-diverged"]
    return [{"severity": event.severity, **event.evidence} for event in found]


def healthy(rank: int, folder: Path, kind: str) -> dict[str, Any]:
    """Train without a fault: the alarms, the parameters, and how many collectives there were."""
    outcome: dict[str, Any] = {}
    for guarded in (False, True):
        model: nn.Module = fully_shard(net()) if kind == "sharded" else DistributedDataParallel(net())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        stabilizer = sf.TrainingStabilizer(model, optimizer) if guarded else None
        numbers = torch.Generator().manual_seed(rank)
        before = collectives_of(dist.group.WORLD)
        for _ in range(20):
            x = torch.randn(16, 6, generator=numbers)
            loss = (model(x) - x[:, :1]).pow(2).mean()
            if stabilizer is None:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            else:
                stabilizer.backward(loss)
                stabilizer.step()
        parts = [getattr(each, "to_local", lambda each=each: each)().detach() for each in model.parameters()]
        outcome["guarded" if guarded else "bare"] = {
            "parameters": [part.flatten().tolist() for part in parts],
            "collectives": collectives_of(dist.group.WORLD) - before,
            "alarms": [] if stabilizer is None else [event.kind for event in stabilizer.incidents],
        }
    return outcome
