"""Set-ups of several ranks that are not plain DDP or FSDP2; `test_odd_ranks.py` starts them and looks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import surefoot as sf
from mesh_scenarios import batch, net
from rank_scenarios import digest_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def refusal(make: Callable[[], Any]) -> str:
    """What is said when something is made; empty if nothing is."""
    try:
        make()
    except (sf.UsageError, sf.SettingError) as error:
        return str(error)
    return ""


def hooked() -> DistributedDataParallel:
    model = DistributedDataParallel(net())
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return model


def zero(model: nn.Module) -> torch.optim.Optimizer:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns of `torch.jit.script` when it is imported

    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.02)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02)


def ddp() -> DistributedDataParallel:
    return DistributedDataParallel(net())


MADE: dict[str, tuple[Any, Any]] = {"fp16 compression": (hooked, adam), "ZeRO-1": (ddp, zero)}


def healthy(rank: int, folder: Path, what: str) -> Any:
    """The same steps bare and guarded, then one that is NaN on one rank."""
    build, optimizer_of = MADE[what]

    def train(guard: bool) -> tuple[Any, ...]:
        model = build()
        optimizer = optimizer_of(model)
        stabilizer = sf.TrainingStabilizer(model, optimizer) if guard else None
        for step in range(8):
            x, y = batch(step, rank, 2)
            loss = (model(x) - y).square().mean()
            if stabilizer is not None:
                stabilizer.backward(loss)
                assert stabilizer.step().applied
            else:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        return model, stabilizer, digest_of(list(model.parameters()))

    _, _, bare = train(False)
    model, stabilizer, guarded = train(True)
    x, y = batch(8, rank, 2)
    stabilizer.backward((model(x) - y).square().mean() * (math.nan if rank == 1 else 1.0))
    skipped = stabilizer.step().skipped
    after = digest_of(list(model.parameters()))
    x, y = batch(9, rank, 2)
    stabilizer.backward((model(x) - y).square().mean())
    return {"bare": bare, "guarded": guarded, "after": after, "skipped": skipped, "next": stabilizer.step().applied}


def refusals(rank: int, folder: Path) -> dict[str, str]:
    """What is said about set-ups that cannot be guarded."""
    model, said = ddp(), {}
    manager = sf.CheckpointManager(folder / "run", every_steps=5)
    said["zero and checkpoints"] = refusal(lambda: sf.TrainingStabilizer(model, zero(model), checkpoints=manager))
    said["zero and recovery"] = refusal(
        lambda: sf.TrainingStabilizer(model, zero(model), recovery=sf.TrainingRecovery())
    )
    said["power"] = refusal(lambda: sf.TrainingStabilizer(powered(), adam(model)))
    plain = powered(use_error_feedback=False, warm_start=False)
    said["plain power"] = refusal(lambda: sf.TrainingStabilizer(plain, adam(plain)))
    late = ddp()
    stabilizer = sf.TrainingStabilizer(late, adam(late))
    state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2)
    late.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    x, y = batch(0, rank, 2)
    said["power later"] = refusal(lambda: stabilizer.backward((late(x) - y).square().mean()))
    return said


def crossed_groups(rank: int, folder: Path) -> list[str]:
    """Two models of one optimizer, each averaged over two ranks, and not the same two."""
    rows, columns = ([dist.new_group(pair) for pair in pairs] for pairs in ([[0, 1], [2, 3]], [[0, 2], [1, 3]]))
    own = [DistributedDataParallel(net(), process_group=group) for group in (rows[rank // 2], columns[rank % 2])]
    parameters = [p for each in own for p in each.parameters()]
    inside = [own[0], ddp()]
    parameters_inside = [p for each in inside for p in each.parameters()]
    return [
        refusal(lambda: sf.TrainingStabilizer(own, torch.optim.SGD(parameters, lr=0.1))),
        refusal(lambda: sf.TrainingStabilizer(inside, torch.optim.SGD(parameters_inside, lr=0.1))),
    ]


def powered(**settings: Any) -> DistributedDataParallel:
    model = ddp()
    state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2, **settings)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return model


def uneven(rank: int, folder: Path) -> str:
    """Rank 1 has fewer batches, inside of `join`."""
    model = ddp()
    stabilizer = sf.TrainingStabilizer(model, adam(model))
    with model.join():
        for step in range(4 - 2 * rank):
            x, y = batch(step, rank, 2)
            said = refusal(lambda: stabilizer.backward((model(x) - y).square().mean()))  # noqa: B023
            if said:
                return said
    return ""


def uneven_and_attached(rank: int, folder: Path) -> str:
    """The same with `attach`."""
    model = ddp()
    optimizer = adam(model)
    sf.attach(model, optimizer)
    with model.join():
        for step in range(4 - 2 * rank):
            x, y = batch(step, rank, 2)
            (model(x) - y).square().mean().backward()
            said = refusal(optimizer.step)
            if said:
                return said
    return ""


def after_join(rank: int, folder: Path, attached: bool) -> Any:
    """Two blocks of `join` that are not guarded, and after each some steps that are; one of these is NaN on rank 1."""
    model = ddp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    skipped = []
    for epoch in range(2):
        with model.join():
            for step in range(4 - 2 * rank):
                x, y = batch(step, rank, 2)
                (model(x) - y).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        guard: Any = sf.attach(model, optimizer) if attached else sf.TrainingStabilizer(model, optimizer)
        for step in range(4):
            x, y = batch(step, rank, 2)
            loss = (model(x) - y).square().mean() * (math.nan if step == 1 + epoch and rank == 1 else 1.0)
            if attached:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            else:
                guard.backward(loss)
                guard.step()
        skipped.append([record.signals.step for record in guard.history if record.skipped])
        if attached:
            guard.detach()
    return skipped, digest_of(model.state_dict())


def groups(rank: int, folder: Path, kind: str) -> Any:
    """Two pairs of ranks train two models; one of the first pair has a NaN, which the second pair knows nothing of."""
    mine = [dist.new_group(pair) for pair in ([0, 1], [2, 3])][rank // 2]
    if kind == "ddp":
        model: nn.Module = DistributedDataParallel(net(), process_group=mine)
    else:
        model = fully_shard(net(), mesh=DeviceMesh.from_group(mine, "cpu"))
    stabilizer = sf.TrainingStabilizer(model, adam(model))
    for step in range(6 + rank // 2):  # the second pair trains longer
        x, y = batch(step, rank % 2, 2)
        loss = (model(x) - y).square().mean()
        stabilizer.backward(loss * (math.nan if step == 3 and rank == 1 else 1.0))
        stabilizer.step()
    return [record.signals.step for record in stabilizer.history if record.skipped]


def replicas_of_a_spread_model(rank: int, folder: Path) -> Any:
    """DDP over one dimension of a mesh, tensor parallelism over the other; the loss of one rank is NaN."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    inner = parallelize_module(net(), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    model = DistributedDataParallel(inner, device_mesh=mesh["dp"])
    stabilizer = sf.TrainingStabilizer(model, adam(model))
    for step in range(6):
        x, y = batch(step, mesh["dp"].get_local_rank(), 2)
        loss = (model(x) - y).square().mean()
        stabilizer.backward(loss + (math.nan if step == 3 and rank == 3 else 0.0))
        stabilizer.step()
    return [record.signals.step for record in stabilizer.history if record.skipped]
