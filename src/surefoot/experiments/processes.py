"""Parallel runs: each is a `surefoot run` in its own process group, and none outlives its time.

Whatever ends the command (its budget, Ctrl-C, an error) ends every run and all its child processes. A run also ends by
itself when its parent process has ended.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from surefoot.core.files import make_subfolder, new_file
from surefoot.errors import UsageError
from surefoot.experiments import sandbox as confine
from surefoot.experiments import scratch_folder
from surefoot.experiments.changes import ORDER
from surefoot.experiments.changes.guard import free_folders, missing_caches

if TYPE_CHECKING:
    from types import TracebackType

    from surefoot.experiments.changes.run_order import RunOrder

OUTPUT = "output.txt"
"""The file with everything that a run printed."""
LARGEST_OUTPUT = 64 << 20


@dataclass(frozen=True)
class Subject:
    """The script or module that is run repeatedly."""

    target: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    folder: Path = field(default_factory=Path.cwd)
    """The working directory that the runs see."""
    share: tuple[Path, ...] = ()
    """Folders and files in it that the script only reads: they are not copied."""
    writable: tuple[Path, ...] = ()
    """Folders elsewhere that the runs may write to."""
    path: tuple[str, ...] | None = None
    """The entries of `PYTHONPATH` that the runs may import from; `None`: all of them."""

    def command(self, scratch: Path) -> list[str]:
        """The arguments after `surefoot run --out DIR`. A script below the working directory is run from the copy."""
        if self.is_module:
            return ["-m", self.target, *self.arguments]
        path = Path(os.path.abspath(self.folder / self.target))
        if self.folder in path.parents:
            path = scratch / path.relative_to(self.folder)
        return ["--", str(path), *self.arguments]


@dataclass
class Child:
    """One run that was started."""

    name: str
    folder: Path
    process: subprocess.Popen[bytes]
    scratch: Path
    began: float
    ended: float | None = None

    @property
    def seconds(self) -> float:
        """How long the run has taken so far, or took."""
        return (self.ended or time.monotonic()) - self.began

    def shorten_output(self) -> None:
        """Empty the output file when it is too large, so that it does not fill the disk."""
        with suppress(OSError):
            if os.path.getsize(self.folder / OUTPUT) > LARGEST_OUTPUT:
                os.truncate(self.folder / OUTPUT, 0)


class Children:
    """Starts runs, waits for them, and ends those that remain."""

    def __init__(self, subject: Subject, out: Path, threads: int) -> None:
        self.subject, self.out, self.threads = subject, out, threads
        self.running: list[Child] = []
        self._scratch = Path()
        self._began = time.time()

    def __enter__(self) -> Children:
        beside = (
            self.out if scratch_folder.shares_blocks(self.out) else None
        )  # a file system on which copies of the user's files share their blocks
        self._scratch = Path(tempfile.mkdtemp(prefix="surefoot-bisect-", dir=beside))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for child in self.running:
            end_session(child.process)
        self.running = []
        shutil.rmtree(self._scratch, ignore_errors=True)

    def start(self, name: str, order: RunOrder) -> Child:
        """Start one run in a copy of the working directory."""
        folder = self.out / name
        try:
            make_subfolder(folder)
        except OSError as error:
            raise UsageError(f"cannot make the folder {folder}: {error.strerror}; set --out to another one") from None
        for old in ("facts.json", "run.json", "findings.json", OUTPUT):  # of an earlier command that was killed
            (folder / old).unlink(missing_ok=True)
        scratch = self._scratch / name
        work = scratch_folder.make(self.subject.folder, scratch / "shadow", self.out, self.subject.share)
        (scratch / "tmp").mkdir()
        own: RunOrder = {"parent": os.getpid(), "scratch": str(scratch), "out": str(self.out), "began": self._began}
        own["writable"] = [str(each) for each in self.subject.writable]
        order = {**order, **own}
        command = [sys.executable, "-m", "surefoot", "run", "--out", str(folder)]
        confined = confine.confined([str(scratch), str(self.out), *own["writable"], *free_folders()])
        with open(new_file(folder / OUTPUT, appending=True), "ab") as log:  # to be appended to wherever it is cut
            process = subprocess.Popen(
                [*confined, *command, *self.subject.command(work)],
                cwd=work,
                env=self._environment(order, scratch / "tmp"),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        child = Child(name, folder, process, scratch, time.monotonic())
        self.running.append(child)
        return child

    def _environment(self, order: RunOrder, temporary: Path) -> dict[str, str]:
        source = str(Path(__file__).parents[2])
        installed = source.endswith(("site-packages", "dist-packages"))
        # MKL's own setting would override a smaller one that the user has set for OpenMP.
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
        threads = {} if any(name in os.environ for name in names) else dict.fromkeys(names, str(self.threads))
        changed = {
            ORDER: json.dumps(order),
            "TMPDIR": str(temporary),
            **missing_caches(str(temporary)),
        }
        given = self.subject.path
        path = filter(None, [os.environ.get("PYTHONPATH")] if given is None else given)
        changed["PYTHONPATH"] = os.pathsep.join([*path, *([] if installed else [source])])
        if order.get("change") == "deterministic":
            changed["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        return os.environ | threads | changed

    def wait(self, until: float) -> Child | None:
        """The next run that ends, by itself or because `until` is reached; `None` if none is running."""
        while self.running:
            for child in self.running:
                child.shorten_output()
                if child.process.poll() is not None:
                    return self._done(child)
            if time.monotonic() >= until:
                return self._done(self.running[0])
            time.sleep(0.05)
        return None

    def _done(self, child: Child) -> Child:
        self.running.remove(child)
        end_session(child.process)
        child.ended = time.monotonic()
        shutil.rmtree(child.scratch, ignore_errors=True)
        return child


def end_session(process: subprocess.Popen[bytes]) -> None:
    """End a process that leads a session, and its child processes."""
    if hasattr(os, "killpg"):
        with suppress(ProcessLookupError, PermissionError):  # all have ended
            os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.wait()
