"""Rows with numbers that tell their step, and scripts that log in processes of their own, without torch."""

from __future__ import annotations

import logging
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import patience
from patience import HANG_SECONDS as HANG_SECONDS
from surefoot.record.messages import Batch, Event, LayerRows, StepRow

if TYPE_CHECKING:
    import subprocess

SOURCE = Path(__file__).parents[1] / "src"
HEAD = """
import logging, os, random, signal, sys, time
from pathlib import Path
import numpy as np
import pyarrow
from runlogs import *
from surefoot.record.limits import LogLimits
from surefoot.record.log import RunLog
from surefoot.record.messages import *
from surefoot.record.reading import load_run
logging.basicConfig(level="INFO")
"""


class KeptEvents:
    """A sink that keeps the events that reach it."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def write(self, batch: Batch) -> None:
        self.events += batch.events

    def close(self) -> None:
        pass


def loss_at(step: int) -> float:
    return 1.0 + step / 7


def step_row(step: int, **more: object) -> StepRow:
    return StepRow(step, 1e9 + step, **{"loss": loss_at(step), "lr": 0.5, **more})


def layer_rows(step: int, layers: int = 5) -> LayerRows:
    names = tuple(f"layer{index}.weight" for index in range(layers))
    values = np.arange(layers, dtype=np.float32) + step
    return LayerRows(step, names, {"grad_norm": values, "update_ratio": values / 2})


def event(step: int | None, name: str = "spike", **more: object) -> Event:
    return Event(name, step, f"{name} at {step}", 1e9, **{"severity": "warning", **more})


def run(code: str, *arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
    """A real process of its own."""
    environment = {"PYTHONPATH": f"{SOURCE}:{Path(__file__).parent}", "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    # Where files may not grow, Python would cut the compiled modules short that it keeps for all processes.
    environment |= {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": sys.pycache_prefix or ""}
    script = [sys.executable, "-W", "error", "-c", HEAD + textwrap.dedent(code), *map(str, arguments)]
    return patience.run(script, env=environment, **options)


def warnings(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def size_of(folder: Path, beginning: str = "") -> int:
    return sum(path.stat().st_size for path in (folder / "telemetry").glob(f"{beginning}*"))
