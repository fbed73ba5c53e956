"""Start the passes of a replay, each in a fresh process, and read their answers.

A pass works in a copy of the working directory, as an experiment does: a script that begins by emptying its log or by
deleting its last run only changes the copy.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from surefoot.errors import UsageError
from surefoot.experiments import scratch_folder
from surefoot.experiments.changes.guard import free_folders, missing_caches
from surefoot.experiments.processes import end_session
from surefoot.experiments.sandbox import confined

if TYPE_CHECKING:
    from surefoot.record.incidents.environment import Hardware, Switches, Versions
    from surefoot.record.incidents.summary import IncidentPrints
    from surefoot.replay.export.export import ReproductionData
    from surefoot.replay.tensor_difference import TensorDifference

_OUTPUT_SHOWN = 20
_LONGEST_TAIL = 64 << 10
_SOURCE = str(Path(sys.modules["surefoot"].__file__ or "").parent.parent)
"""Where surefoot is imported from."""
_BEGIN = "import sys; sys.path[0] = sys.argv.pop(1); from surefoot.replay.worker import main; main(sys.argv[1])"


@dataclass(frozen=True)
class Order:
    """What to run again."""

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
    share: tuple[Path, ...] = ()
    """Folders and files of the working directory that the script only reads: they are not copied."""
    writable: tuple[Path, ...] = ()
    """Folders elsewhere that the script may write to."""
    path: tuple[str, ...] = ()
    """The folders searched for modules besides installed packages: the allowed part of `PYTHONPATH`."""
    began: float = field(default_factory=time.time)
    """Files that are older are the user's."""


class PassOrder(TypedDict):
    """The order of one pass, in JSON: the fields of an `Order` that the pass needs, and what belongs to the pass."""

    incident: str
    script: str | None
    module: str | None
    """The module that trains, in place of a script."""
    arguments: list[str]
    target: str | None
    export: str | None
    began: float
    writable: list[str]
    locate: bool
    """Whether to look for the first bad operation."""
    answer: str
    """The file that the answer is written to."""
    scratch: str
    """The folder that the pass may write to."""


@dataclass(frozen=True)
class ReplayPass:
    """What one pass found, which its process answers in JSON: `status` is `ran`, or `failed` with an `error`."""

    prints: IncidentPrints
    """The fingerprints of losses, inputs and gradients."""
    differences: dict[str, TensorDifference]
    """How the gradients differ from the recorded ones, where those were kept."""
    versions: Versions
    """The versions of everything that computes."""
    hardware: Hardware
    """The device of the step, and the host's processor."""
    switches: Switches
    """The settings that decide which kernels run."""
    notes: list[str] = field(default_factory=list)
    """What could not be done as recorded."""
    origin: Mapping[str, object] | None = None
    """The first bad operation, if it was looked for and found."""
    reproduction: ReproductionData | None = None
    """The script that was written, or why none was; `None` if none was asked for."""


def run_pass(order: Order, scratch: Path, number: int, locate: bool) -> ReplayPass:
    """One pass. Raises `UsageError` if the step could not be run."""
    answer, output = scratch / f"answer-{number}.json", scratch / f"output-{number}.txt"
    temporary = scratch / f"tmp-{number}"
    work = scratch_folder.make(Path.cwd(), scratch / f"shadow-{number}", leave_out=scratch.resolve(), share=order.share)
    temporary.mkdir()
    content: PassOrder = {
        "incident": str(order.incident.resolve()),
        "script": None if order.script is None or order.module else _below_here(order.script),
        "module": order.script if order.module else None,
        "arguments": list(order.arguments),
        "target": order.target,
        "locate": locate,
        "export": None if order.export is None else str(order.export.resolve()),
        "answer": str(answer),
        "scratch": str(scratch),
        "began": order.began,
        "writable": [str(each) for each in order.writable],
    }
    if order.export is not None:
        order.export.mkdir(parents=True, exist_ok=True)  # the pass itself may write only inside the copy
    order_file = scratch / f"order-{number}.json"
    order_file.write_text(json.dumps(content))
    # Not with `-m`, which looks for modules in the working directory first.
    writable = [
        str(scratch),
        *content["writable"],
        *([content["export"]] if content["export"] else []),
        *free_folders(),
    ]
    command = [*confined(writable), sys.executable, "-c", _BEGIN, _SOURCE, str(order_file)]
    with output.open("wb") as sink:
        code = _run(command, order.seconds, cwd=work, env=_environment(temporary, order.path), stdout=sink)
    if order.export is not None:
        with suppress(OSError):  # it is not empty
            order.export.rmdir()
    as_real = _RealPaths(str(work), str(Path.cwd()))
    if code is None:
        raise UsageError(
            f"the step was not reached within {order.seconds:g} seconds. Increase --seconds.{as_real(_tail(output))}"
        )
    if not answer.is_file():
        raise UsageError(f"the replay ended with exit code {code} before the step.{as_real(_tail(output))}")
    found = as_real(json.loads(answer.read_text()))
    if found["status"] != "ran":
        raise UsageError(f"{found['error']}.{as_real(_tail(output))}")
    names = ReplayPass.__dataclass_fields__
    return ReplayPass(**{name: value for name, value in found.items() if name in names})


def _run(command: list[str], seconds: float, **settings: Any) -> int | None:
    """The exit code, or `None` after a timeout. Child processes are ended too."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT, start_new_session=True, **settings
    )
    try:
        return process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        end_session(process)


def _below_here(script: str) -> str:
    """The script as seen from the scratch folder."""
    path, here = Path(os.path.abspath(script)), Path.cwd()
    return str(path.relative_to(here)) if here in path.parents else str(path)


class _RealPaths:
    """The output of a pass, with the working directory in place of the scratch folder."""

    def __init__(self, scratch: str, real: str) -> None:
        self._scratch, self._real = scratch, real

    def __call__(self, printed: Any) -> Any:
        if isinstance(printed, str):
            return printed.replace(self._scratch, self._real)
        if isinstance(printed, list):
            return [self(each) for each in printed]
        return {key: self(value) for key, value in printed.items()} if isinstance(printed, dict) else printed


def _environment(temporary: Path, path: tuple[str, ...]) -> dict[str, str]:
    """The environment of a pass: the same surefoot as here, and temporary files in a folder that is deleted."""
    own = {"PYTHONPATH": os.pathsep.join([_SOURCE, *path]), "TMPDIR": str(temporary)}
    return {**os.environ, **own, **missing_caches(str(temporary))}


def _tail(output: Path) -> str:
    with output.open("rb") as file:  # for a script that prints without end, only the last part
        file.seek(max(0, output.stat().st_size - _LONGEST_TAIL))
        lines = file.read().decode(errors="replace").rstrip().splitlines()[-_OUTPUT_SHOWN:]
    return "" if not lines else "\n" + "\n".join(f"    {line}" for line in lines)
