"""What two ranks do together over gloo, one function a scenario; `test_recovery_on_ranks.py` starts them and looks."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import surefoot as sf

if TYPE_CHECKING:
    from pathlib import Path

# ---- parts ------------------------------------------------------------------------------------------------------


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Tanh(), nn.Dropout(0.1), nn.Linear(10, 1))


def built(kind: str) -> nn.Module:
    if kind == "ddp":
        return DistributedDataParallel(net())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Dropout(0.1), nn.Linear(9, 1))  # shards of unequal size
    fully_shard(model[0])
    return fully_shard(model)


def rows() -> TensorDataset:
    made = torch.Generator().manual_seed(1)
    x = torch.randn(64, 6, generator=made)
    return TensorDataset(torch.arange(64), x, x.sum(1, keepdim=True).sin())


def local(value: Any) -> Any:
    return value.to_local() if hasattr(value, "to_local") else value


def digest_of(value: Any) -> str:
    """One line that tells whether two nested states are equal bit by bit."""
    if isinstance(value, Tensor):
        part = local(value).detach().contiguous()
        value = (str(part.dtype), tuple(part.shape), part.view(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        value = [(repr(key), digest_of(each)) for key, each in value.items()]
    elif isinstance(value, (list, tuple)):
        value = [digest_of(each) for each in value]
    return hashlib.sha256(repr(value).encode()).hexdigest()


def summary(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    streams = (random.random(), np.random.random(), torch.rand(3))
    return {
        "parameters": digest_of(list(model.parameters())),
        "buffers": digest_of(list(model.buffers())),
        "optimizer": digest_of(optimizer.state_dict()),
        "streams": digest_of(streams),
    }


# ---- runs that are stopped and started again --------------------------------------------------------------------

SLOW_STEPS = 15
"""Where a slow run waits until the signals have been sent."""


def train(
    rank: int, folder: Path, kind: str = "ddp", at: int = -1, what: str = "", who: int = -1, slow: float = 0
) -> dict[str, Any]:
    """A run of 24 steps; at one of them something happens to one rank, or to all. A slow one waits for signals."""
    checkpoints = sf.CheckpointManager(folder, every_steps=5)
    random.seed(rank)
    np.random.seed(rank)
    model = built(kind)
    torch.manual_seed(10 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    stabilizer = sf.TrainingStabilizer(
        model,
        optimizer,
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 7),
        checkpoints=checkpoints,
        recovery=sf.TrainingRecovery(every_steps=5),
    )
    sampler = DistributedSampler(rows(), shuffle=True, seed=3)
    loader = DataLoader(rows(), batch_size=4, sampler=sampler)
    seen = []
    first = None
    for epoch in stabilizer.epochs(3):
        sampler.set_epoch(epoch)
        for index, x, y in stabilizer.resume(loader):
            first = stabilizer.steps if first is None else first
            seen.append(index.tolist())
            loss = (model(x) - y).square().mean() * (1 + 0.01 * random.random())
            if stabilizer.steps == at and who in (rank, -1):
                happen(what, rank, folder)
            stabilizer.backward(loss)
            stabilizer.step()
            if what:
                checkpoints.wait()  # what happens next finds it on the disk, however slow that is
            (folder / f"at-{rank}").write_text(str(stabilizer.steps))
            time.sleep(slow)
            while slow and stabilizer.steps >= SLOW_STEPS and not (folder / "sent").exists():
                time.sleep(slow)  # signals are on their way
    return {**summary(model, optimizer), "first": first, "seen": seen, "steps": stabilizer.steps}


def happen(what: str, rank: int, folder: Path) -> None:
    if what == "exit":
        time.sleep(0.3 * rank)
        os._exit(9)
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "usr1":
        os.kill(os.getpid(), signal.SIGUSR1)
    if what == "terminate":
        os.kill(os.getpid(), signal.SIGTERM)


# ---- trouble on one rank ------------------------------------------------------------------------------------------

FAULT_AT, STEPS = 45, 85
CHECKER = sf.StabilityChecker(
    spike=sf.Spike(min_steps=20), setback=sf.Setback(window_steps=32, min_steps=16), lost_progress=None
)
"""Looks for spikes and setbacks after fewer steps than by default."""


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(1_000 * rank + step)
    x = torch.randn(8, 6, generator=made)
    return x, x.sum(1, keepdim=True).sin()


@torch.no_grad()
def fault(what: str, step: int, model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Something goes wrong on the rank that calls this."""
    since = step - FAULT_AT
    # Behind the normalisation, or of those shards that both ranks have a part of.
    weight = local(list(model.parameters())[-2 if isinstance(model, DistributedDataParallel) else 0])
    if what == "weight" and since == 0:
        weight.data.mul_(-20)
    if what == "nan-weight" and since == 0:
        weight.fill_(torch.nan)
    lasts = {"batch": 1, "burst": 8, "long burst": 32, "endless": 1_000}
    if 0 <= since < lasts.get(what, 0):
        x[0] = torch.nan
    if what == "spike" and since == 0:
        y.mul_(1e4)
    if what == "other-data" and since >= 0:
        y.add_(3)


def meet(
    rank: int,
    folder: Path,
    what: str,
    kind: str = "ddp",
    lag: bool = False,
    disk: bool = False,
    first: Any = "roll_back",
) -> Any:
    """A run in which rank 1 meets with a fault; rank 0 looks at the counts all the time."""
    model = built(kind)
    torch.manual_seed(10 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    checkpoints = sf.CheckpointManager(folder / "run", every_steps=20) if disk or what == "endless" else None
    stabilizer = sf.TrainingStabilizer(
        model,
        optimizer,
        recovery=sf.TrainingRecovery(every_steps=1_000 if disk else 10, first=first),
        checkpoints=checkpoints,
        checker=CHECKER,
        decide_on="device" if lag else "host",
        escalation=sf.Escalation(skips=12, cuts=0) if what == "endless" else sf.Escalation(),
    )
    states, halted = [], None
    for step in range(STEPS):
        x, y = batch(rank, step)
        if rank == 1:
            fault(what, step, model, x, y)
        if disk and step == FAULT_AT:
            stabilizer._run.persistence.weights.forget_snapshots()
        try:
            stabilizer.backward((model(x) - y).square().mean())
            stabilizer.step()
        except sf.TrainingHalted as error:
            halted = [stabilizer.steps, str(error)]
            break
        if rank == 0:
            _ = stabilizer.counts, stabilizer.history, stabilizer.incidents
        if step >= STEPS - 20 or what == "endless":  # the others are compared by their last 20 states
            states.append(digest_of([list(model.parameters()), optimizer.state_dict()]))
    actions = [[i.step, i.action, i.summary] for i in stabilizer.incidents if i.kind == "recovery"]
    skipped = [record.signals.step for record in stabilizer.history if record.skipped]
    rate = stabilizer._run.results.lr_factor
    return {"states": states, "actions": actions, "skipped": skipped, "halted": halted, "rate": rate}


REPEAT_AT = 70


def go_over_again(rank: int, folder: Path, what: str, lag: bool = False) -> Any:
    """A run of 110 steps with batches from `resume`, in which rank 1 meets with a fault, or nobody does."""
    model = built("ddp")
    torch.manual_seed(10 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    stabilizer = sf.TrainingStabilizer(
        model,
        optimizer,
        recovery=sf.TrainingRecovery(every_steps=10, repeat=True),
        checker=sf.StabilityChecker(explosion=None, spike=None),
        decide_on="device" if lag else "host",
    )
    met, taken = False, 0
    for x, y in stabilizer.resume([batch(rank, step) for step in range(110)]):
        step, taken = stabilizer.steps, taken + 1
        x, y = x.clone(), y.clone()
        if what == "bad batch" and rank == 1 and step == REPEAT_AT:
            y.mul_(200)
        if what == "nan-weight" and rank == 1 and step == REPEAT_AT and not met:
            met = True
            fault(what, FAULT_AT, model, x, y)
        stabilizer.backward((model(x) - y).square().mean())
        stabilizer.step()
    actions = [[i.step, i.action, i.summary] for i in stabilizer.incidents if i.kind.startswith("recovery")]
    return {"state": digest_of(list(model.parameters())), "actions": actions, "taken": taken, "steps": stabilizer.steps}


# ---- what ranks see of the disk -----------------------------------------------------------------------------------


def come_back(rank: int, folder: Path, given: list[Any], loads: str = "resume") -> Any:
    """Continue from checkpoints in a folder per rank; gives the step, or the error in words."""
    model = built("ddp")
    checkpoints = None if given[rank] is None else sf.CheckpointManager(folder / given[rank], every_steps=5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7)
    recovery = sf.TrainingRecovery(every_steps=5)
    stabilizer = sf.TrainingStabilizer(
        model, optimizer, scheduler=scheduler, checkpoints=checkpoints, recovery=recovery
    )
    try:
        if loads == "resume":
            stabilizer.resume([])
        else:
            stabilizer.restore(int(loads))
    except (sf.CheckpointError, sf.UsageError) as error:
        return f"{type(error).__name__}: {error}"
    return [stabilizer.steps, digest_of(list(model.parameters()))]


def fail_to_write(rank: int, folder: Path) -> Any:
    """The disk of rank 1 takes nothing after step 10."""
    import resource

    model = built("ddp")
    stabilizer = sf.TrainingStabilizer(
        model,
        torch.optim.AdamW(model.parameters(), lr=0.02),
        scheduler=None,
        checkpoints=sf.CheckpointManager(folder, every_steps=5),
    )
    for step in range(20):
        x, y = batch(rank, step)
        if rank == 1 and step == 12:
            stabilizer._run.persistence.checkpoints.wait()
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
        stabilizer.backward((model(x) - y).square().mean())
        assert stabilizer.step().applied
    stabilizer._run.persistence.checkpoints.wait()
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    dist.barrier()
    return [stabilizer.steps, stabilizer.restore()]


def hard_batches(rank: int, folder: Path, lag: bool, signal_name: str = "loss") -> Any:
    """From step 80 on one of the ranks has a hard batch, each in turn; their mean is what it may be."""
    model = DistributedDataParallel(nn.Linear(4, 1))
    stabilizer = sf.TrainingStabilizer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        checker=sf.StabilityChecker(spike=None, explosion=None, setback=sf.Setback(signal=signal_name)),
        recovery=sf.TrainingRecovery(every_steps=10),
        decide_on="device" if lag else "host",
    )
    for step in range(110):
        level = 10.0 if step < 5 else 4.5 if step >= 80 and step % 2 == rank else 1.0
        if step == 80 and signal_name != "loss":  # without damage there is nothing to return from
            with torch.no_grad():
                model.module.weight.data.add_(50.0)
        output = model(torch.ones(2, 4)).mean()
        stabilizer.observe(level=level)
        stabilizer.backward(output - output.detach() + level)
        stabilizer.step()
    return [[i.step, i.action] for i in stabilizer.incidents if i.kind == "recovery"]


def keep_incident(rank: int, folder: Path) -> dict[str, Any]:
    """One rank's batch is bad at step 2: both refuse the step, and each keeps its own part of it."""
    model = built("ddp")
    stabilizer = sf.TrainingStabilizer(model, torch.optim.SGD(model.parameters(), lr=0.01), incidents=folder / "run")
    for step, (_, x, y) in enumerate(stabilizer.resume(DataLoader(rows(), batch_size=8))):
        x = x + (torch.inf if (rank, step) == (1, 2) else 0.0)
        stabilizer.backward((model(x) - y).square().mean())
        stabilizer.step()
    return {"counts": stabilizer.counts}


def fail_collective(rank: int, folder: Path) -> dict[str, Any]:
    """One rank leaves after two steps: the collective of the other one fails, and its script goes on."""
    model = DistributedDataParallel(nn.Linear(6, 1))  # without buffers: no collective in the forward
    stabilizer = sf.TrainingStabilizer(model, torch.optim.SGD(model.parameters(), lr=0.01), log=folder / "run")
    raised = ""
    for step, (_, x, y) in enumerate(DataLoader(rows(), batch_size=8)):
        if (rank, step) == (1, 2):
            os._exit(0)
        try:
            stabilizer.backward((model(x) - y).square().mean())
            stabilizer.step()
        except RuntimeError as error:
            raised = type(error).__name__
            break
    stabilizer.log.close()
    return {"raised": raised}
