"""Starts scenarios on several ranks: real processes over gloo (see `forked`).

A deadlock is a failure: whoever hangs is ended, and shows its stacks.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import forked


class Ranks:
    """Starts scenarios in processes of their own."""

    def __init__(self) -> None:
        self._stores = 0

    def start(self, play: Any, folder: Path, count: int = 2, **settings: Any) -> list[forked.Program]:
        """Start a scenario on every rank."""
        self._stores += 1
        folder.mkdir(exist_ok=True)
        scenario = [play.__module__, play.__name__, json.dumps(settings), folder, folder / f"store-{self._stores}"]
        return [forked.start([__file__, *scenario, rank, count]) for rank in range(count)]

    def play(self, play: Any, folder: Path, count: int = 2, **settings: Any) -> list[int]:
        """Play a scenario to its end; returns the exit status of each rank."""
        return end_of(self.start(play, folder, count, **settings))


def play_all(module: str, folder: Path) -> list[dict[str, str]]:
    """Play every scenario of a module in turn on two ranks; returns of each rank "ok" or the error, by scenario."""
    end_of(Ranks().start(play_each, folder, module=module))
    files = [folder / f"result-{rank}.json" for rank in range(2)]
    return [json.loads(file.read_text()) if file.exists() else {} for file in files]


def play_each(rank: int, folder: Path, module: str) -> dict[str, str]:
    """One rank of `play_all`."""
    played = {}
    for name, play in import_module(module).SCENARIOS.items():
        try:
            play(rank)
            played[name] = "ok"
        except Exception:
            played[name] = traceback.format_exc()
            break  # the other rank may be waiting in a collective: what follows would only hang
    return played


def end_of(processes: list[forked.Program]) -> list[int]:
    """Wait for the ranks, and give their exit status. What they wrote to stderr is shown with a failure."""
    ended = [process.end() for process in processes]
    for each in ended:
        sys.stderr.write(each.stderr)
    return [each.returncode for each in ended]


def enter(module: str, name: str, settings: str, folder: Path, store: str, rank: int, count: int) -> None:
    """One rank: joins the others, plays, and leaves what it says in a file."""
    torch.set_num_threads(1)
    logging.basicConfig(filename=folder / f"log-{rank}", level=logging.INFO)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)
    try:
        result = getattr(import_module(module), name)(rank, folder, **json.loads(settings))
    except Exception:
        result = traceback.format_exc()
        print(f"rank {rank}: {result}", file=sys.stderr)
        os._exit(1)  # the other rank may wait in a collective, and this one would wait for it
    (folder / f"result-{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def results(folder: Path, count: int = 2) -> list[Any]:
    """What the ranks of the last scenario in a folder said."""
    return [json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(count)]


if __name__ == "__main__":
    _, _module, _name, _settings, _folder, _store, _rank, _count = sys.argv
    enter(_module, _name, _settings, Path(_folder), _store, int(_rank), int(_count))
