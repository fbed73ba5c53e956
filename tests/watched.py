"""Tiny scripts under the real watcher, each in a process of its own, for the price of a fork (see `forked`)."""

from __future__ import annotations

import json
import tempfile
import textwrap
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import forked

if TYPE_CHECKING:
    from surefoot.diagnose.findings import Diagnosis, Finding
    from surefoot.record.facts import RunDescription, RunFacts

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
    output: str
    errors: str

    @cached_property
    def loaded(self) -> tuple[RunFacts, RunDescription]:
        from surefoot.diagnose.engine import load

        return load(self.folder / "run")

    @cached_property
    def facts(self) -> dict[str, Any]:
        """As `facts.json` has them."""
        return self.loaded[0].to_json()

    @cached_property
    def diagnosis(self) -> Diagnosis:
        from surefoot.diagnose.engine import diagnose

        assert self.loaded[0].problems == {}, "a probe gave up"
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
        return next(int(look["step"]) for look in self.facts["sampled_steps"] if look["step"] >= step)

    def names_first(self, cause: str, *, step: int | None, at: str, evidence: set[str]) -> Finding:
        """The first finding, after checking its cause, step, place (the one line that holds `at`) and evidence."""
        first = self.first
        assert first.cause == cause, [(f.cause, f.severity, f.summary) for f in self.diagnosis.findings]
        assert first.severity != "info"
        assert first.step == step
        assert (self.at(at) if at.startswith("|") else at) in first.where, first.where
        if at.startswith("|"):
            assert at[1:] in first.evidence["source"][self.at(at)]
        assert set(first.evidence) >= evidence, first.evidence
        return first

    def finding(self, cause: str) -> Finding:
        return next(finding for finding in self.diagnosis.findings if finding.cause == cause)

    def at(self, text: str) -> str:
        """File and line of the one line that holds the text (after a `|`), as surefoot writes them."""
        words = text.removeprefix("|")
        (number,) = (n for n, line in enumerate(self.source.splitlines(), 1) if words in line)
        return f"train.py:{number}"


class Nursery:
    """Runs scripts under the watcher; the same text runs only once."""

    def __init__(self) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="watched-")
        self._known: dict[str, Watched] = {}

    def __call__(self, *parts: str) -> Watched:
        """Run the parts, joined, as `train.py` under the watcher."""
        return self._run(parts)

    def given(self, arguments: list[str], *parts: str) -> Watched:
        """Run the parts with arguments of their own."""
        return self._run(parts, arguments=arguments)

    def guarded(self, *parts: str) -> Watched:
        """Run the parts with `--guard`."""
        return self._run(parts, options=["--guard"])

    def eagerly(self, *parts: str) -> Watched:
        """Run the parts with `--eager-looks`."""
        return self._run(parts, options=["--eager-looks"])

    def under(self, order: dict[str, Any], *parts: str) -> Watched:
        """Run the parts as an experiment of `surefoot bisect` would be: with one change, and an end."""
        return self._run(parts, order=order)

    def _run(
        self,
        parts: tuple[str, ...],
        *,
        options: list[str] | None = None,
        arguments: list[str] | None = None,
        order: dict[str, Any] | None = None,
    ) -> Watched:
        source = "\n".join(textwrap.dedent(part).strip("\n") for part in parts) + "\n"
        key = json.dumps([source, options, arguments, order], sort_keys=True)
        if key not in self._known:
            folder = Path(tempfile.mkdtemp(dir=self._scratch.name))
            (folder / "train.py").write_text(source)
            experiment = json.dumps({"scratch": str(folder), "began": 0.0, **(order or {})})
            environment = forked.environment(**({"SUREFOOT_EXPERIMENT": experiment} if order is not None else {}))
            command = ["-m", "surefoot", "run", "--out", "run", *(options or []), "train.py", *(arguments or [])]
            imported = forked.COMPILER if "compile(" in source else ()
            ended = forked.run(command, cwd=folder, env=environment, imported=imported)
            self._known[key] = Watched(source, folder, ended.returncode, ended.stdout, ended.stderr)
            assert (folder / "run" / "facts.json").exists(), ended.stderr[-2000:]
        return self._known[key]

    def command(self, folder: Path, *arguments: str) -> tuple[int, str, str]:
        """`surefoot ARGUMENTS` in a folder: its exit code, stdout and stderr."""
        ended = forked.run(["-m", "surefoot", *arguments], cwd=folder, starts_forks=True)
        return ended.returncode, ended.stdout, ended.stderr

    def close(self) -> None:
        self._scratch.cleanup()


def deep(act: str = "nn.ReLU()", layers: int = 5, rate: str = "1e-2", optimizer: str = "Adam", width: int = 32) -> str:
    """A part of a script: a deep network of linear layers, and its optimizer."""
    body = f"nn.Linear(8, {width}), {act}, " + f"nn.Linear({width}, {width}), {act}, " * (layers - 2)
    return (
        f"model = nn.Sequential({body}nn.Linear({width}, 3))\n"
        f"optimizer = torch.optim.{optimizer}(model.parameters(), lr={rate})\n"
    )
