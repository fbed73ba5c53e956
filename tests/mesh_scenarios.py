"""What ranks do together on meshes of one and two dimensions; `test_mesh.py` starts them and looks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import surefoot as sf
from rank_scenarios import digest_of

if TYPE_CHECKING:
    from pathlib import Path

STEPS = 6


def net() -> nn.Sequential:
    torch.manual_seed(0)
    # On four ranks the rows of the first layer are cut into 3, 3, 3 and 1, those of the last into 1, 1, 1 and 0.
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))


def spread(kind: str) -> tuple[nn.Module, int, int]:
    """The model on the ranks there are; which share of each batch this rank takes, and of how many."""
    model, rank, world = net(), dist.get_rank(), dist.get_world_size()
    if kind == "plain":
        return model, 0, 1
    if kind == "ddp":
        return DistributedDataParallel(model), rank, world
    if kind == "fsdp":
        fully_shard(model[0])
        return fully_shard(model), rank, world
    if kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(model[0], mesh=mesh)
        return fully_shard(model, mesh=mesh), rank, world
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    if kind == "tp":
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
        return parallelize_module(model, mesh, plan), 0, 1
    assert kind == "fsdp-tp"
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp"])
    return model, mesh["dp"].get_local_rank(), world // 2


def batch(step: int, share: int, shares: int) -> tuple[Tensor, Tensor]:
    """This rank's share of the rows of a step."""
    x = torch.randn(12, 6, generator=torch.Generator().manual_seed(step))
    rows = slice(share * 12 // shares, (share + 1) * 12 // shares)
    return x[rows], x.sum(1, keepdim=True).sin().expand(12, 3)[rows]


def whole(value: Any) -> Any:
    """A nested state with every DTensor whole. Every rank must call."""
    if isinstance(value, Tensor):
        return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
    if isinstance(value, dict):
        return {key: whole(each) for key, each in value.items()}
    return [whole(each) for each in value] if isinstance(value, (list, tuple)) else value


def whole_state(model: nn.Module, optimizer: Any, scheduler: Any, stabilizer: Any) -> dict[str, str]:
    """One line for each part of a run, the same on every rank and on every number of ranks."""
    return {
        "parameters": digest_of([whole(p) for p in model.parameters()]),
        "moments": digest_of(whole(optimizer.state_dict()["state"])),
        "rates": digest_of([group["lr"] for group in optimizer.param_groups]),
        "schedule": digest_of({k: v for k, v in scheduler.state_dict().items() if k != "_get_lr_called_within_step"}),
        "steps": str(stabilizer.steps),
        "counts": repr(stabilizer.counts),
    }


def made(kind: str, folder: Path | None, **settings: Any) -> tuple[Any, ...]:
    model, share, shares = spread(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4)
    checkpoints = sf.CheckpointManager(folder / "run", every_steps=None) if folder is not None else None
    stabilizer = sf.TrainingStabilizer(
        model, optimizer, scheduler=scheduler, clip=sf.ClipByNorm(1.0), checkpoints=checkpoints, **settings
    )
    return model, optimizer, scheduler, stabilizer, share, shares


def walk(rank: int, folder: Path, kind: str) -> Any:
    """Take a run up from its newest checkpoint, train a few steps, save; gives the states it found and left.

    What the rules have learned is each rank's own, since each judges its own loss.
    """
    torch.manual_seed(10 + rank)
    model, optimizer, scheduler, stabilizer, share, shares = made(kind, folder)
    stabilizer.restore()
    found = whole_state(model, optimizer, scheduler, stabilizer)
    streams, rules = digest_of(torch.get_rng_state()), digest_of(stabilizer.state_dict()["policy"])
    for _ in range(STEPS):
        x, y = batch(stabilizer.steps, share, shares)
        stabilizer.backward((model(x) - y).square().mean())
        stabilizer.step()
    torch.rand(rank + 1)
    left = whole_state(model, optimizer, scheduler, stabilizer)
    stabilizer.save()
    return {
        "found": found,
        "left": left,
        "streams": [streams, digest_of(torch.get_rng_state())],
        "rules": [rules, digest_of(stabilizer.state_dict()["policy"])],
    }


def healthy(rank: int, folder: Path, kind: str) -> Any:
    """The same steps bare and guarded."""

    def train(guard: bool) -> list[str]:
        model, optimizer, scheduler, stabilizer, share, shares = made(kind, None) if guard else bare(kind)
        for step in range(STEPS):
            x, y = batch(step, share, shares)
            loss = (model(x) - y).square().mean()
            if stabilizer is not None:
                stabilizer.backward(loss)
                assert stabilizer.step().applied
            else:
                loss.backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        return [digest_of(whole(list(model.parameters()))), digest_of(whole(optimizer.state_dict()))]

    def bare(kind: str) -> tuple[Any, ...]:
        model, share, shares = spread(kind)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 4), None, share, shares

    return [train(False), train(True)]


def made_unclipped(kind: str, **settings: Any) -> tuple[Any, ...]:
    model, share, shares = spread(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, sf.TrainingStabilizer(model, optimizer, **settings), share, shares


BAD = {13: math.nan, 15: 1e6}
"""The steps in which one rank's loss is multiplied by this. Spikes are looked for after 10 steps here."""
STEPS_OF_TROUBLE = 17
CHECKER = sf.StabilityChecker(spike=sf.Spike(min_steps=10))


def trouble(rank: int, folder: Path, kind: str) -> Any:
    """One rank has bad batches after many good ones; gives which steps were refused, and whether anything changed."""
    model, optimizer, stabilizer, share, shares = made_unclipped(kind, checker=CHECKER)
    changed = []
    before = [digest_of(list(model.parameters())), digest_of(optimizer.state_dict())]
    for step in range(STEPS_OF_TROUBLE):
        x, y = batch(step, share, shares)
        loss = (model(x) - y).square().mean()
        if rank == 1 and step in BAD:
            loss = loss * BAD[step]
        stabilizer.backward(loss)
        stabilizer.step()
        after = [digest_of(list(model.parameters())), digest_of(optimizer.state_dict())]
        if after != before:
            changed.append(step)
        before = after
    skipped = [record.signals.step for record in stabilizer.history if record.skipped]
    norms = [float(record.signals.grad_norm) for record in stabilizer.history][:10]
    return {"skipped": skipped, "changed": changed, "norms": norms, "whole": digest_of(whole(list(model.parameters())))}


def healthy_then_trouble(rank: int, folder: Path, kind: str) -> Any:
    """Both in the same processes: how the operations of a mesh are spread is found out once in each."""
    return {"healthy": healthy(rank, folder, kind), "trouble": trouble(rank, folder, kind)}
