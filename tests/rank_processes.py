"""Starts scenarios on several ranks: real processes over gloo, forked from a server that has torch loaded already.

Many short lives are quick that way. A deadlock is a failure: whoever hangs is ended, and shows its stacks.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import multiprocessing
import os
import signal
import sys
import time
import traceback
from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo  # torch imports it at the first optimizer step: once is enough
import torch.distributed as dist

from patience import HANG_SECONDS

if TYPE_CHECKING:
    from pathlib import Path


class Ranks:
    """Starts scenarios in processes of their own."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        try:
            self._context.set_forkserver_preload(["rank_scenarios"])
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
    """Wait for the ranks, and give their exit status. Those that hang are aborted, which their status shows."""
    deadline = time.monotonic() + HANG_SECONDS
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0.1))
        if process.is_alive():
            os.kill(process.pid, signal.SIGABRT)
            process.join()
    return [process.exitcode for process in processes]


def enter(play: Any, rank: int, count: int, store: Path, folder: Path, settings: dict[str, Any]) -> None:
    """One rank: joins the others, plays, and leaves what it says in a file."""
    faulthandler.enable()
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
