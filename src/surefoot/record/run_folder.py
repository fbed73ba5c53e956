"""The run folder: `run.json` describes the run and its end, `facts.json` the observations, `findings.json` the causes.

Files are written under a temporary name and renamed, so that a reader never sees an incomplete one, and without
secrets: see `surefoot.core.redaction`.
"""

from __future__ import annotations

import json
import math
import platform
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from surefoot.core.files import write_file
from surefoot.core.formats import RUN
from surefoot.core.redaction import Redactor


def folder_for(wanted: str | None, name: str, here: str, began: float, rank: int, world_size: int) -> Path:
    """The folder of this process's run: the requested one, or `runs/<script>-<date>-<time>`; one per rank."""
    folder = Path(here) / (wanted if wanted is not None else _unused(Path(here), name, began, world_size))
    return folder / f"rank{rank}" if world_size > 1 else folder


def _unused(here: Path, name: str, began: float, world_size: int) -> Path:
    stem = Path(name).stem or "run"
    base = here / "runs" / f"{stem}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(began))}"
    if world_size > 1:  # the ranks of one run share a folder
        return base
    for number in range(1000):
        path = base if number == 0 else base.with_name(f"{base.name}-{number}")
        if not path.exists():
            return path
    return base


def report_command(folder: Path) -> str:
    """The command that shows a run on one page.

    >>> report_command(Path("runs/exp 1"))
    "surefoot report 'runs/exp 1'"
    """
    return f"surefoot report {shlex.quote(str(folder))}"


def write_json(path: Path, value: Any) -> None:
    """Write one file completely or not at all, without secrets and without the path of the user's home."""
    write_file(path, as_json(Redactor(identity=False).inside(value)))


def as_json(value: Any, indent: int | None = None) -> str:
    """The value as JSON text. Non-finite numbers are written as words."""
    separators = (",", ":") if indent is None else None

    def text(plain: Any) -> str:
        return json.dumps(plain, ensure_ascii=False, separators=separators, indent=indent, default=str, allow_nan=False)

    try:
        return text(value)
    except (ValueError, TypeError):  # a non-finite number, or a key that is not text: rare, and slow to convert
        return text(json_values(value))


def describe_run(
    target: str, arguments: tuple[str, ...], is_module: bool, guard: bool, began: float
) -> dict[str, object]:
    """The description of a run: script, host and versions."""
    return {
        "schema": RUN.version,
        "script": target,
        "module": is_module,
        "arguments": Redactor(identity=False).arguments(arguments),
        "guard": guard,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(began)),
        "python": platform.python_version(),
        "platform": sys.platform,
    }


def json_values(value: Any) -> Any:
    """The same value with words for non-finite numbers, and with keys that are text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {str(key): json_values(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_values(item) for item in value]
    return value
