"""Many programs at once, for tests on a machine where each start takes long.

They are forked from one process that has imported torch (see `forked`), which never uses the device itself, and run
side by side. With the environment variable `SUREFOOT_TEST_FRESH` each is a fresh interpreter instead.

`DEVICE` is `cuda`; `SUREFOOT_TEST_DEVICE=cpu` runs the same tests on the CPU, where all of them must pass, too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch

import forked

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

DEVICE = os.environ.get("SUREFOOT_TEST_DEVICE", "cuda")
ON_DEVICE = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a CUDA device"),
]
_SLOW_SECONDS = 600


@dataclass(frozen=True)
class Ended:
    """A program that has ended."""

    code: int
    out: str
    errors: str
    folder: Path
    """Where it ran."""

    @property
    def last_line(self) -> Any:
        """The last line of stdout, which is JSON."""
        assert self.code == 0, self.errors[-3000:]
        return json.loads(self.out.splitlines()[-1])

    def written(self, name: str) -> Any:
        """A JSON file of its run folder."""
        path = self.folder / "run" / name
        assert path.exists(), self.errors[-3000:]
        return json.loads(path.read_text())


def run_all(programs: Mapping[Any, tuple[Any, ...]], *, fresh: bool = False) -> dict[Any, Ended]:
    """`python ARGUMENTS` for each program, all at the same time: its folder, its arguments, perhaps its environment.

    `fresh`: each is a fresh interpreter, as with `SUREFOOT_TEST_FRESH`.
    """
    fresh = fresh or bool(os.environ.get("SUREFOOT_TEST_FRESH"))
    started = {key: _start(*program, fresh=fresh) for key, program in programs.items()}
    ended = {}
    for key, program in started.items():
        if isinstance(program, subprocess.Popen):
            out, errors = program.communicate(timeout=_SLOW_SECONDS)
            ended[key] = Ended(program.returncode, out, errors, programs[key][0])
        else:
            done = program.end()
            ended[key] = Ended(done.returncode, done.stdout, done.stderr, programs[key][0])
    return ended


def _start(folder: Path, arguments: Sequence[Any], more: Mapping[str, str] | None = None, *, fresh: bool) -> Any:
    words, environment = list(map(str, arguments)), forked.environment(**(more or {}))
    if not fresh:
        return forked.start(words, cwd=folder, env=environment)
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *words], cwd=folder, env=environment, **pipes)


def watched(*arguments: Any, options: Sequence[str] = ()) -> list[Any]:
    """`surefoot run` of `train.py` into the folder `run`."""
    return ["-m", "surefoot", "run", "--out", "run", *options, "train.py", *arguments]
