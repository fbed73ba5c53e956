"""Start the passes of a replay, each in a fresh process, and read their answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surefoot.errors import UsageError

_OUTPUT_SHOWN = 20


@dataclass(frozen=True)
class Order:
    """What to run again, and with what."""

    incident: Path
    script: str | None = None
    module: bool = False
    arguments: tuple[str, ...] = ()
    target: str | None = None
    """`module:function`, in place of a script."""
    seconds: float = 600.0
    """How long one pass may take."""
    export: Path | None = None
    """Where a reproduction of the failure goes, if one is wanted."""


@dataclass(frozen=True)
class Pass:
    """What one pass found."""

    prints: dict[str, Any]
    differences: dict[str, Any]
    """How the gradients differ from the recorded ones, where those were kept."""
    versions: dict[str, Any]
    hardware: dict[str, Any]
    switches: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    origin: dict[str, Any] | None = None
    reproduction: dict[str, Any] | None = None
    """The script that was written, or why none was; `None` if nobody asked."""


def run_pass(order: Order, scratch: Path, number: int, locate: bool) -> Pass:
    """One pass. Raises `UsageError` if the step could not be run."""
    answer, output = scratch / f"answer-{number}.json", scratch / f"output-{number}.txt"
    paper = {
        "incident": str(order.incident.resolve()),
        "script": order.script,
        "module": order.module,
        "arguments": list(order.arguments),
        "target": order.target,
        "locate": locate,
        "export": None if order.export is None else str(order.export.resolve()),
        "answer": str(answer),
    }
    letter = scratch / f"order-{number}.json"
    letter.write_text(json.dumps(paper))
    command = [sys.executable, "-m", "surefoot.diagnose.replay.worker", str(letter)]
    with output.open("wb") as sink:
        try:
            ended = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                timeout=order.seconds,
                env=_environment(),
            )
        except subprocess.TimeoutExpired:
            raise UsageError(
                f"the step was not reached within {order.seconds:g} seconds. Give more with --seconds.{_tail(output)}"
            ) from None
    if not answer.is_file():
        raise UsageError(f"the replay ended with exit code {ended.returncode} before the step.{_tail(output)}")
    found = json.loads(answer.read_text())
    if found["status"] != "ran":
        raise UsageError(f"{found['error']}.{_tail(output)}")
    names = Pass.__dataclass_fields__
    return Pass(**{name: value for name, value in found.items() if name in names})


def _environment() -> dict[str, str]:
    """The same surefoot as here, wherever it is imported from."""
    root = str(Path(sys.modules["surefoot"].__file__ or "").parent.parent)
    before = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{before}" if before else root}


def _tail(output: Path) -> str:
    lines = output.read_text(errors="replace").rstrip().splitlines()[-_OUTPUT_SHOWN:]
    return "" if not lines else "\n" + "\n".join(f"    {line}" for line in lines)
