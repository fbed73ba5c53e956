"""The three processes of the demo: start them together, read their output."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from typing import IO, TYPE_CHECKING, Any

from surefoot.core.files import write_file
from surefoot.errors import SurefootError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

SCRIPT = "train.py"
NAMES = ("clean", "bare", "guarded")
_STEP = re.compile(r"step \d+ loss (\S+)")


class DemoFailed(SurefootError):
    """One of the demo's runs failed."""


@dataclass
class DemoRun:
    """One of the three runs, and its output so far."""

    name: str
    folder: Path
    losses: list[float] = field(default_factory=list)
    output: list[str] = field(default_factory=list)
    """Lines that it printed to stderr."""
    results: dict[str, Any] = field(default_factory=dict)
    """The results that the script wrote at its end: `losses`, `validation` and `incidents`."""

    @property
    def has_faults(self) -> bool:
        """Whether faults are injected."""
        return self.name != "clean"

    def words(self, steps: int, seed: int) -> list[str]:
        """The arguments after `python` or `surefoot run`."""
        words = [str(self.folder.parent / SCRIPT), "--steps", str(steps), "--seed", str(seed)]
        words += ["--results", str(self.folder / "results.json")]
        words += ["--faults"] if self.has_faults else []
        return words + (["--guard", "--log", str(self.folder)] if self.name == "guarded" else [])

    def command(self, steps: int, seed: int) -> list[str]:
        """The command: the bare run is started with `surefoot run`, as a user would start it."""
        watched = ["-m", "surefoot", "run", "--out", str(self.folder)] if self.name == "bare" else []
        return [sys.executable, *watched, *self.words(steps, seed)]


def prepare(out: Path) -> list[DemoRun]:
    """Write the script to the folder, which must be new, empty, or the folder of an earlier demo."""
    held = {path.name for path in out.iterdir()} if out.is_dir() else set()
    if out.exists() and (not out.is_dir() or (held and (SCRIPT not in held or held - {SCRIPT, *NAMES}))):
        raise UsageError(f"{out} contains files that are not of a demo. Set --out to a new or empty folder.")
    runs = [DemoRun(name, out / name) for name in NAMES]
    try:
        for run in runs:
            shutil.rmtree(run.folder, ignore_errors=True)
            run.folder.mkdir(parents=True)
        write_file(out / SCRIPT, (files("surefoot.zoo") / "demo" / SCRIPT).read_bytes())
    except OSError as error:
        raise UsageError(
            f"cannot write into {out}: {error.strerror or error}. Choose another folder with --out."
        ) from None
    return runs


@contextmanager
def under_way(runs: list[DemoRun], steps: int, seed: int, width: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Start the runs, with threads that read their output. All are ended at the end."""
    environment = {**os.environ, "COLUMNS": str(width), "PYTHONUNBUFFERED": "1"}
    processes: list[subprocess.Popen[str]] = []
    readers: list[threading.Thread] = []
    try:
        for run in runs:
            process = subprocess.Popen(
                run.command(steps, seed),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                encoding="utf-8",
                errors="replace",
                env=environment,
            )
            processes.append(process)
            for target, stream in ((_read_losses, process.stdout), (_read_words, process.stderr)):
                readers.append(threading.Thread(target=target, args=(run, stream), daemon=True))
                readers[-1].start()
        yield processes
    finally:
        for process in processes:
            process.terminate()  # has no effect on those that have ended
        for process in processes:
            process.wait()
        for reader in readers:
            reader.join()


def collect(runs: list[DemoRun], processes: list[subprocess.Popen[str]]) -> None:
    """Check that the runs succeeded and read their results."""
    for run, process in zip(runs, processes, strict=True):
        if process.returncode != 0:
            last = run.output[-1] if run.output else "no output"
            raise DemoFailed(f"the {run.name} run ended with exit code {process.returncode}: {last}")
        run.results = json.loads((run.folder / "results.json").read_text(encoding="utf-8"))


def _read_losses(run: DemoRun, stream: IO[str]) -> None:
    with stream:
        for line in stream:
            if found := _STEP.match(line):
                run.losses.append(float(found[1]))


def _read_words(run: DemoRun, stream: IO[str]) -> None:
    with stream:
        run.output.extend(line.rstrip("\n") for line in stream)
