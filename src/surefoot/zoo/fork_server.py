"""Scripts that run side by side, each in a fork of one process that has imported torch.

Importing torch and surefoot takes seconds, and forking takes none. `ForkServer` starts that process, tells it what to
run, and returns how the runs ended. The process (`python -m surefoot.zoo.fork_server JOBS`) reads runs from stdin and
writes exit codes to stdout, each a line of JSON. It computes nothing and never touches a device: a fork could not use
it. When its stdin ends, it ends, and every run with it.

A run differs from one of a fresh interpreter in what is imported already. The interpreter is not taken down, and torch
does not deregister its operators at the end.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import pkgutil
import runpy
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from surefoot.watch import run_script

_POLL_SECONDS = 0.01


@dataclass(frozen=True)
class ForkedRun:
    """One run of a script."""

    script: str
    arguments: tuple[str, ...]
    place: str
    """The working directory, which exists."""
    output: str
    """The file that gets what the run prints."""
    run_folder: str = ""
    """Where `surefoot run` writes; empty: the script runs by itself."""
    timeout_s: float = float("inf")
    """It is killed when it has run for so long."""
    device: str = ""
    """What the script runs on, see `surefoot.zoo.on_device`; empty: it runs as it is."""


class ForkServer:
    """A process that forks; in a `with` statement, at whose end it ends with all its runs."""

    def __init__(self, jobs: int) -> None:
        source = str(Path(__file__).parents[2])
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",  # and so no threads, which a fork would not have
            "JE_ARROW_MALLOC_CONF": "background_thread:false",  # nor one of pyarrow's
            "PYTHONPATH": os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")])),
        }
        command = [sys.executable, "-m", "surefoot.zoo.fork_server", str(jobs)]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._runs: dict[int, ForkedRun] = {}
        self._count = 0

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def submit(self, run: ForkedRun) -> None:
        """Have a run made as soon as there is a free place."""
        self._runs[self._count] = run
        with suppress(BrokenPipeError):  # it has ended, which `ended` says
            print(json.dumps([self._count, asdict(run)]), file=self._process.stdin, flush=True)
        self._count += 1

    def ended(self) -> Iterator[tuple[ForkedRun, int | None]]:
        """Runs as they end, with their exit codes (`None`: it took too long), until none is left."""
        assert self._process.stdout is not None
        while self._runs:
            line = self._process.stdout.readline()
            if not line:
                raise RuntimeError(f"the process that forks has ended with exit code {self._process.wait()}")
            number, code = json.loads(line)
            yield self._runs.pop(number), code


# ---- in the process that forks --------------------------------------------------------------------------------------


def import_watching() -> None:
    """What every watched run imports, once. The collector then leaves it alone, and forks share it."""
    importlib.import_module("torch._dynamo")
    for name in ("watch", "record", "observe", "diagnose"):
        package = importlib.import_module(f"surefoot.{name}")
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__"):
                with suppress(ImportError):  # what not everybody has installed
                    importlib.import_module(module.name)
    gc.freeze()


def serve(jobs: int) -> None:
    """Start what is read from stdin, until that ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the end of stdin follows, and ends the runs too
    waiting: deque[tuple[int, ForkedRun]] = deque()
    running: dict[int, tuple[int, float]] = {}
    try:
        for line in _lines():
            if line:
                number, held = json.loads(line)
                waiting.append((number, ForkedRun(**held)))
            while waiting and len(running) < jobs:
                number, run = waiting.popleft()
                child = os.fork()
                if child == 0:
                    become(run)
                running[child] = number, time.monotonic() + run.timeout_s
            for child, (number, deadline) in list(running.items()):
                is_late = time.monotonic() > deadline
                if is_late:
                    _kill(child)
                ended, status = os.waitpid(child, 0 if is_late else os.WNOHANG)
                if ended:
                    _kill_group(child)  # what it has started
                    del running[child]
                    print(json.dumps([number, None if is_late else os.waitstatus_to_exitcode(status)]), flush=True)
    finally:
        for child in running:
            _kill(child)


def _lines() -> Iterator[bytes]:
    """The lines of stdin as they come, and an empty one whenever none has come for a while."""
    read = b""
    while True:
        if select.select([0], [], [], _POLL_SECONDS)[0]:
            added = os.read(0, 1 << 16)
            if not added:
                return
            *lines, read = (read + added).split(b"\n")
            yield from lines
        yield b""


def _kill(child: int) -> None:
    """Kill a child that has not been waited for, and what it has started."""
    _kill_group(child)
    os.kill(child, signal.SIGKILL)  # it may not lead its group yet


def _kill_group(leader: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


# ---- in a fork ------------------------------------------------------------------------------------------------------


def become(run: ForkedRun) -> NoReturn:
    """Run the script to its end, as `python` or `surefoot run` would."""
    leave = os._exit  # a watched script finds another one
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
        finalizer.atexit = False  # of torch's libraries of operators: together they take 0.03 s
    code = 1
    try:
        _prepare(run)
        try:
            _execute(run)
            code = 0
        except SystemExit as request:
            if isinstance(request.code, (int, type(None))):
                code = (request.code or 0) & 0xFF
            else:
                print(request.code, file=sys.stderr)
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__)
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
    finally:
        leave(code)


def _prepare(run: ForkedRun) -> None:
    """What a process of its own would have."""
    import numpy as np
    import torch

    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    nothing, output = os.open(os.devnull, os.O_RDONLY), os.open(run.output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for place, descriptor in enumerate((nothing, output, output)):
        os.dup2(descriptor, place)
    os.close(nothing)
    os.close(output)
    os.chdir(run.place)
    for seed_anew in (np.random.seed, torch.default_generator.seed):  # as their imports do; `random` does it by itself
        seed_anew()
    if run.device:
        from surefoot.zoo.on_device import use_device

        use_device(torch.device(run.device))


def _execute(run: ForkedRun) -> None:
    if run.run_folder:
        sys.argv = ["surefoot", "run", "--out", run.run_folder, run.script, *run.arguments]
        runpy.run_module("surefoot", run_name="__main__")
    else:
        run_script.run(run_script.Target(run.script, tuple(run.arguments)), run_script.Ending())


if __name__ == "__main__":
    import_watching()
    with suppress(ImportError):  # more than a third of the zoo imports it
        importlib.import_module("sklearn.datasets")
    serve(int(sys.argv[1]))
