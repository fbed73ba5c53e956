"""Tiny scripts under the real watcher, each in a process of its own, for the price of a fork.

One nursery process imports torch and surefoot once and computes nothing, so that it has no threads; every script runs
in a child forked from it, through the `RunSession` of `surefoot run`, and leaves a real run folder behind.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from patience import HANG_SECONDS, ended

if TYPE_CHECKING:
    from surefoot.diagnose.findings import Diagnosis, Finding

SOURCE = str(Path(__file__).parents[1] / "src")

CLASSES = """
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
x = torch.randn(256, 8)
y = x[:, :3].argmax(1)
"""
"""Data for three classes, which a small network learns in a few dozen steps."""

VALUES = """
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
x = torch.randn(256, 8)
y = x[:, :1] + 0.5 * x[:, 1:2]
"""
"""Data for a regression."""

NET = """
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
"""

FIT = """
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
"""

LOOP = """
for step in range(60):
    rows = torch.randint(len(x), (32,))
    optimizer.zero_grad()
    loss = loss_of(model(x[rows]), y[rows])
    loss.backward()
    optimizer.step()
"""
"""Needs `loss_of`, `model` and `optimizer`."""


@dataclass(frozen=True)
class Watched:
    """A script that ran, and what surefoot makes of its run folder."""

    source: str
    folder: Path
    exit_code: int

    @cached_property
    def loaded(self) -> tuple[dict[str, Any], dict[str, Any]]:
        from surefoot.diagnose.engine import load

        return load(self.folder / "run")

    @property
    def facts(self) -> dict[str, Any]:
        return self.loaded[0]

    @cached_property
    def diagnosis(self) -> Diagnosis:
        from surefoot.diagnose.engine import diagnose

        assert self.facts.get("problems", {}) == {}, "a probe gave up"
        return diagnose(*self.loaded, strict=True)

    @property
    def first(self) -> Finding:
        assert self.diagnosis.findings, f"no finding at all; the script said: {self.errors[-2000:]}"
        return self.diagnosis.findings[0]

    @property
    def causes(self) -> list[str]:
        """What was claimed in earnest."""
        return [finding.cause for finding in self.diagnosis.findings if finding.severity != "info"]

    def look_after(self, step: int) -> int:
        """The first step from there on that was looked at."""
        return next(int(look["step"]) for look in self.facts["looks"] if look["step"] >= step)

    def names_first(self, cause: str, *, step: int | None, at: str, evidence: set[str]) -> Finding:
        """The first finding, after checking its cause, step, place (the one line that holds `at`) and evidence."""
        first = self.first
        assert first.cause == cause, [(f.cause, f.severity, f.summary) for f in self.diagnosis.findings]
        assert first.severity != "info"
        assert first.step == step
        assert (self.at(at) if at.startswith("|") else at) in first.where, first.where
        assert set(first.evidence) >= evidence, first.evidence
        return first

    def finding(self, cause: str) -> Finding:
        return next(finding for finding in self.diagnosis.findings if finding.cause == cause)

    def at(self, text: str) -> str:
        """File and line of the one line that holds the text (after a `|`), as surefoot writes them."""
        words = text.removeprefix("|")
        (number,) = (n for n, line in enumerate(self.source.splitlines(), 1) if words in line)
        return f"train.py:{number}"

    @cached_property
    def errors(self) -> str:
        return (self.folder / "stderr").read_text()


class Nursery:
    """The process that scripts are forked from. Starts with the first script; the same text runs only once."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._scratch = tempfile.TemporaryDirectory(prefix="watched-")
        self._known: dict[str, Watched] = {}

    def __call__(self, *parts: str) -> Watched:
        """Run the parts, joined, as `train.py` under the watcher."""
        source = "\n".join(textwrap.dedent(part).strip("\n") for part in parts) + "\n"
        if source not in self._known:
            self._known[source] = self._run(source)
        return self._known[source]

    def given(self, arguments: list[str], *parts: str) -> Watched:
        """Run the parts with arguments of their own."""
        source = "\n".join(textwrap.dedent(part).strip("\n") for part in parts) + "\n"
        key = json.dumps(arguments) + source
        if key not in self._known:
            self._known[key] = self._run(source, arguments=arguments)
        return self._known[key]

    def guarded(self, *parts: str) -> Watched:
        """Run the parts with `--guard`."""
        source = "\n".join(textwrap.dedent(part).strip("\n") for part in parts) + "\n"
        key = "--guard" + source
        if key not in self._known:
            self._known[key] = self._run(source, guard=True)
        return self._known[key]

    def under(self, order: dict[str, Any], *parts: str) -> Watched:
        """Run the parts as an experiment of `surefoot bisect` would be: with one change, and an end."""
        source = "\n".join(textwrap.dedent(part).strip("\n") for part in parts) + "\n"
        key = json.dumps(order, sort_keys=True) + source
        if key not in self._known:
            self._known[key] = self._run(source, order)
        return self._known[key]

    def _run(
        self,
        source: str,
        order: dict[str, Any] | None = None,
        arguments: list[str] | None = None,
        guard: bool = False,
    ) -> Watched:
        folder = Path(self._scratch.name) / str(len(self._known))
        folder.mkdir()
        (folder / "train.py").write_text(source)
        if order is not None:
            (folder / "order.json").write_text(json.dumps({"scratch": str(folder), "began": 0.0, **order}))
        if guard:
            (folder / "guard").touch()
        if arguments is not None:
            (folder / "arguments.json").write_text(json.dumps(arguments))
        watched = Watched(source, folder, self._ask(folder, []))
        assert (folder / "run" / "facts.json").exists(), watched.errors[-2000:]
        return watched

    def command(self, folder: Path, *arguments: str) -> tuple[int, str, str]:
        """`surefoot ARGUMENTS` in a folder: its exit code, stdout and stderr."""
        code = self._ask(folder, list(arguments))
        return code, (folder / "stdout").read_text(), (folder / "stderr").read_text()

    def _ask(self, folder: Path, arguments: list[str]) -> int:
        if self._process is None:
            self._process = _start()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([str(folder), arguments]) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.close()
            ended(self._process)
            self._process.stdout.close()
        self._scratch.cleanup()


def _start() -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": SOURCE, "PYTHONHASHSEED": "0"}
    environment.pop("SUREFOOT_DEBUG", None)
    return subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )


def _serve() -> None:
    """In the nursery: a folder and arguments per line, one exit code back."""
    import gc

    import torch._dynamo  # noqa: F401 (the first optimizer would import it, for seconds)

    import surefoot.commands.run
    import surefoot.diagnose.rules
    import surefoot.watch.crash
    import surefoot.watch.log_rows
    import surefoot.watch.patches
    import surefoot.watch.watcher  # noqa: F401 (torch and all that watches it, once for every child)

    assert len(os.listdir("/proc/self/task")) == 1 if os.path.exists("/proc/self/task") else True
    gc.freeze()  # what is imported needs no second look, and its pages stay shared
    answers = os.dup(1)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _run_here(*json.loads(line))
        _, status = os.waitpid(child, 0)
        os.write(answers, f"{os.waitstatus_to_exitcode(status)}\n".encode())


def _run_here(folder: str, arguments: list[str]) -> None:
    """In the child: `surefoot ARGUMENTS`, or the script as `surefoot run --out run train.py` would."""
    import faulthandler
    import signal

    import torch

    from surefoot.watch import messages as voice

    leave, code = os._exit, 0
    os.chdir(folder)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    faulthandler.register(signal.SIGALRM, file=2, chain=True)  # one that hangs shows where, and ends
    signal.alarm(int(HANG_SECONDS))
    sys.stdin = open(os.devnull)  # noqa: SIM115 (it lives as long as the child)
    voice._stream = sys.stderr
    torch.set_num_threads(1)
    if os.path.exists("order.json"):
        os.environ["SUREFOOT_EXPERIMENT"] = Path("order.json").read_text()
    try:
        code = _answer(arguments) if arguments else _train()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        leave(code)


def _answer(arguments: list[str]) -> int:
    from surefoot.__main__ import main

    sys.argv, sys.path[0] = ["surefoot", *arguments], os.getcwd()
    try:
        main()
    except SystemExit as request:
        return request.code if isinstance(request.code, int) else int(request.code is not None)
    return 0


def _train() -> int:
    from surefoot.commands.run import Request, RunSession
    from surefoot.watch.run_script import Target

    given = json.loads(Path("arguments.json").read_text()) if os.path.exists("arguments.json") else []
    request = Request(Target("train.py", tuple(given)), out="run", guard=os.path.exists("guard"))
    session, code = RunSession(request), 0
    try:
        session.run()
    except BaseException:
        code = session.ending.code
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    session._close()
    return code


if __name__ == "__main__":
    _serve()
