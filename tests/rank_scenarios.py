"""What two ranks do together over gloo, one function a scenario; `test_recovery_on_ranks.py` starts them and looks.

`Ranks` starts real processes, forked from a server that has torch loaded already, so that many short lives are quick.
A deadlock is a failure: whoever has not ended in time is killed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import multiprocessing
import os
import random
import signal
import sys
import time
import traceback
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch._dynamo  # torch imports it at the first optimizer step: once is enough
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import surefoot as sf

if TYPE_CHECKING:
    from pathlib import Path

TIMEOUT_S = 60


class Ranks:
    """Starts scenarios in processes of their own."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        try:
            self._context.set_forkserver_preload([__name__])
            self._context.Process(target=int).start()  # the server starts, with that path
        finally:
            if before is None:
                del os.environ["PYTHONPATH"]
            else:
                os.environ["PYTHONPATH"] = before
        self._stores = 0

    def start(self, play: Any, folder: Path, count: int = 2, **settings: Any) -> list[Any]:
        """Start a scenario on every rank."""
        self._stores += 1
        folder.mkdir(exist_ok=True)
        store = folder / f"store-{self._stores}"
        given = [(play, rank, count, store, folder, settings) for rank in range(count)]
        processes = [self._context.Process(target=enter, args=each) for each in given]
        for process in processes:
            process.start()
        return processes

    def play(self, play: Any, folder: Path, count: int = 2, **settings: Any) -> list[int]:
        """Play a scenario to its end; returns the exit status of each rank."""
        return end_of(self.start(play, folder, count, **settings))


def end_of(processes: list[Any]) -> list[int]:
    """Wait for the ranks, and give their exit status. Those that do not end are killed, which their status shows."""
    deadline = time.monotonic() + TIMEOUT_S
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0.1))
        if process.is_alive():
            process.kill()
            process.join()
    return [process.exitcode for process in processes]


def enter(play: Any, rank: int, count: int, store: Path, folder: Path, settings: dict[str, Any]) -> None:
    """One rank: joins the others, plays, and leaves what it says in a file."""
    torch.set_num_threads(1)
    logging.basicConfig(filename=folder / f"log-{rank}", level=logging.INFO)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)
    try:
        result = play(rank, folder, **settings)
    except Exception:
        result = traceback.format_exc()
        print(f"rank {rank}: {result}", file=sys.stderr)
        os._exit(1)  # the other rank may wait in a collective, and this one would wait for it
    (folder / f"result-{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def results(folder: Path, count: int = 2) -> list[Any]:
    """What the ranks of the last scenario in a folder said."""
    return [json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(count)]


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


def train(
    rank: int, folder: Path, kind: str = "ddp", at: int = -1, what: str = "", who: int = -1, slow: float = 0
) -> dict[str, Any]:
    """A run of 24 steps; at one of them something happens to one rank, or to all."""
    random.seed(rank)
    np.random.seed(rank)
    model = built(kind)
    torch.manual_seed(10 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    stabilizer = sf.TrainingStabilizer(
        model,
        optimizer,
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 7),
        checkpoints=sf.CheckpointManager(folder, every_steps=5),
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
            (folder / f"at-{rank}").write_text(str(stabilizer.steps))
            time.sleep(slow)
    return {**summary(model, optimizer), "first": first, "seen": seen, "steps": stabilizer.steps}


def happen(what: str, rank: int, folder: Path) -> None:
    if what == "exit":
        time.sleep(0.3 * rank)
        os._exit(9)
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "terminate":
        os.kill(os.getpid(), signal.SIGTERM)
