"""A training process that gets signals.

    python interrupted.py '{"kind": "plain", "folder": "...", "out": "...", "seed": 0, "held": false}'

It writes what it prints to `out`. One that is `held` does not end before a file says that its signal was sent, however
late that is.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

import surefoot as sf
from resumed import BATCH, PASS, Run, data, seed_all, shuffled
from surefoot.core.random_state import read_streams

EPOCHS = 4
HOLD_BATCH = EPOCHS * PASS - 5
"""The batch that a child which is held waits at."""
SENT = ".sent"
"""Ends the name of the file beside its output that lets it go."""
held_by: list[Path] = []


def wait_for_the_signal() -> None:
    """Returns when the signal has been sent, or at once in a child that is not held."""
    while held_by and not held_by[0].exists():
        time.sleep(0.005)


def say(*words: object) -> None:
    """One line in one write, so that a message printed by a signal handler cannot come between its words."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


class Slow(Run):
    """A training whose steps take long enough to be hit by a signal; tells each."""

    def __init__(self, folder: Path, **parts: Any) -> None:
        self.average: Any = None
        self.taken = 0
        schedule = {"epochs": EPOCHS, "scheduler": lambda o: sf.warmup_cosine(o, 5, 30)}
        super().__init__(folder, also=Slow.averaged, **schedule, **parts)

    def averaged(self) -> dict[str, Any]:
        self.average = torch.optim.swa_utils.AveragedModel(self.model)
        return {"average": self.average}

    def step(self, batch: Any) -> None:
        super().step(batch)
        time.sleep(0.02)
        self.average.update_parameters(self.model)
        say("batch")
        self.taken += 1
        if self.taken == HOLD_BATCH:
            say("held")
            wait_for_the_signal()

    def tell(self) -> None:
        tensors = [*self.model.state_dict().values(), *self.average.state_dict().values(), read_streams()["torch"]]
        say("end", *(float(tensor.double().sum()) for tensor in tensors))


def plain(folder: Path) -> None:
    run = Slow(folder)
    run.train()
    run.tell()


def accumulating(folder: Path) -> None:
    run = Slow(folder, accumulate=3)
    run.train()
    run.tell()


def workers(folder: Path) -> None:
    run = Slow(folder, loader=lambda: shuffled(2))
    run.train()
    run.tell()


def writing(folder: Path) -> None:
    """Hardly a moment at which no checkpoint is being written."""
    run = Slow(
        folder, every_steps=1, model=lambda: nn.Sequential(nn.Linear(6, 40_000), nn.GELU(), nn.Linear(40_000, 1))
    )
    run.train()
    run.tell()


def epochs(folder: Path) -> None:
    """Evaluates between passes, slowly, and with random numbers."""
    run = Slow(folder)
    for _ in run.stabilizer.epochs(EPOCHS):
        for batch in run.stabilizer.resume(run.loader):
            run.step(batch)
        say("evaluation")
        for _ in range(10):
            time.sleep(0.02)
            run.model(torch.randn(4, 6))
        if run.taken == 2 * PASS:
            wait_for_the_signal()
    run.tell()


def long_step(folder: Path) -> None:
    run = Slow(folder)
    for batch in run.batches():
        run.step(batch)
        if run.stabilizer.steps == 3:
            say("asleep")
            while True:
                time.sleep(0.05)  # a signal that arrives just before a sleep does not end it


def own_handler(folder: Path) -> None:
    signal.signal(signal.SIGTERM, lambda *_: say("mine"))
    plain(folder)


def begin_and_sleep(begun: Any) -> None:
    begun.set()
    time.sleep(1e6)


def with_child(folder: Path) -> None:
    """A process of the program's own, started in the loop and ended there."""
    run = Slow(folder)
    for batch in run.batches():
        run.step(batch)
        if run.stabilizer.steps == 3:
            context = multiprocessing.get_context("fork")
            begun = context.Event()
            child = context.Process(target=begin_and_sleep, args=(begun,))
            child.start()
            begun.wait()
            child.terminate()
            child.join()
            say("child", child.exitcode)
            child.kill()


class Stalling(torch.utils.data.Dataset[Any]):
    """Rows with noise. The third batch of the first process to ask for it never comes; half of it is drawn by then."""

    def __init__(self, folder: Path) -> None:
        self._rows, self._stalled = data(), folder / "stalled"
        self._own = torch.Generator().manual_seed(3)
        self._asked = 0

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        x, y = self._rows[index]
        noise = torch.randn(x.shape) + torch.randn(x.shape, generator=self._own) + random.random() + np.random.rand()
        self._asked += 1
        if self._asked == 2 * BATCH + 2 and not self._stalled.exists():
            self._stalled.touch()
            say("stalled")
            os.read(os.pipe()[0], 1)  # nobody will ever write
        return x + 0.1 * noise, y


def stalled(folder: Path, workers: int = 0) -> None:
    if folder.name.startswith("undisturbed"):
        folder.mkdir()
        (folder / "stalled").touch()
    run = Slow(folder, loader=lambda: DataLoader(Stalling(folder), BATCH, shuffle=True, num_workers=workers))
    run.train()
    run.tell()


def stalled_worker(folder: Path) -> None:
    stalled(folder, workers=1)


class Locking(torch.utils.data.Dataset[Any]):
    """In the first process that asks for its third batch, a worker never returns the lock of its loader's event."""

    def __init__(self, folder: Path) -> None:
        self._rows, self._locked = data(), folder / "locked"
        self._asked = 0

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        self._asked += 1
        if self._asked == 2 * BATCH + 2 and not self._locked.exists():
            self._locked.touch()
            frame: Any = sys._getframe()
            while frame.f_code.co_name != "_worker_loop":
                frame = frame.f_back
            frame.f_locals["done_event"]._cond.acquire()
            say("locked")
            os.read(os.pipe()[0], 1)  # nobody will ever write
        return self._rows[index]


def locked_worker(folder: Path) -> None:
    if folder.name.startswith("undisturbed"):
        folder.mkdir()
        (folder / "locked").touch()
    run = Slow(folder, loader=lambda: DataLoader(Locking(folder), BATCH, shuffle=True, num_workers=1))
    run.train()
    run.tell()


KINDS = {
    each.__name__: each
    for each in (
        *(plain, accumulating, workers, writing, epochs, long_step, own_handler, with_child),
        *(stalled, stalled_worker, locked_worker),
    )
}


def main(command: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    out = os.open(command["out"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever started the tests may ignore it
    seed_all(int(command["seed"]))
    if command["held"]:
        held_by.append(Path(command["out"] + SENT))
    KINDS[command["kind"]](Path(command["folder"]))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
