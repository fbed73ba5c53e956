"""Runs a zoo script as several ranks under `surefoot run`, each a process of its own, as `torchrun` would start them.

A rank that hangs must not hang the scoreboard: when the time is up, every process prints the stacks of its threads
(`output.txt` in the run folder has them) and is ended.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from surefoot.record.rank_watch import VARIABLE

HANG_SECONDS = 5
"""A rank is called stopped after so long, rather than after half a minute."""
COUNT = 2
"""How many ranks a script is run with."""
_POLL_SECONDS = 0.05
_STACKS_SECONDS = 5.0
"""So long a process may take to print its stacks."""


def run_ranks(script: Path, seed: int, folder: Path, timeout_s: float) -> str:
    """Run a script into a folder, which gets one folder per rank. Returns what went wrong, or nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "surefoot", "run", "--out", str(folder), str(script), str(seed)]
    port = _free_port()
    with tempfile.TemporaryDirectory(prefix="surefoot-zoo-cwd-") as place, open(folder / "output.txt", "wb") as output:
        ranks = [
            subprocess.Popen(command, cwd=place, env=_environment(rank, port), stdout=output, stderr=output)
            for rank in range(COUNT)
        ]
        hung = _wait(ranks, timeout_s)
    if hung:
        return f"{hung} of {COUNT} ranks still running after {timeout_s:g} s; their stacks are in {folder}/output.txt"
    missing = [rank for rank in range(COUNT) if not (folder / f"rank{rank}" / "facts.json").exists()]
    if len(missing) < COUNT and all(ranks[rank].returncode == -signal.SIGABRT for rank in missing):
        return ""  # gloo aborts a process whose collectives do not match; the other ranks know enough
    return f"ranks {missing} left no facts, exit codes {[each.returncode for each in ranks]}" if missing else ""


def _environment(rank: int, port: int) -> dict[str, str]:
    """What `torchrun` sets, and where surefoot is."""
    source = str(Path(__file__).parents[2])
    return os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(COUNT),
        "LOCAL_WORLD_SIZE": str(COUNT),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        VARIABLE: str(HANG_SECONDS),
        "PYTHONFAULTHANDLER": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")])),
    }


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _wait(ranks: list[subprocess.Popen[bytes]], timeout_s: float) -> int:
    """Wait for all of them; those that hang print their stacks and are ended. Returns how many did."""
    deadline = time.monotonic() + timeout_s
    try:
        while any(each.poll() is None for each in ranks) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
    finally:
        hung = [each for each in ranks if each.poll() is None]
        for each in hung:
            each.send_signal(signal.SIGABRT)
        for each in hung:
            with suppress(subprocess.TimeoutExpired):
                each.wait(_STACKS_SECONDS)
            each.kill()
            each.wait()
    return len(hung)
