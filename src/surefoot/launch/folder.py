"""The run folder: `run.json` says what ran and how it ended, `facts.json` what was seen, `findings.json` what it means.

Files are written under a temporary name and renamed, so that a reader never sees half of one.
"""

from __future__ import annotations

import json
import math
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

SCHEMA = 1


def default_folder(name: str) -> Path:
    """`runs/<script>-<date>-<time>`, made unique if need be."""
    stem = Path(name).stem or "run"
    base = Path("runs") / f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in range(1000):
        path = base if number == 0 else base.with_name(f"{base.name}-{number}")
        if not path.exists():
            return path
    return base


def write_json(path: Path, value: Any) -> None:
    """Write one file whole or not at all."""
    scratch = path.with_name(path.name + ".part")
    scratch.write_text(as_json(value), encoding="utf-8")
    os.replace(scratch, path)


def as_json(value: Any, indent: int | None = None) -> str:
    """The text of a value. JSON has no NaN: what is not finite is written as a word."""
    separators = (",", ":") if indent is None else None
    return json.dumps(_clean(value), ensure_ascii=False, separators=separators, indent=indent, default=str)


def describe_run(target: str, arguments: tuple[str, ...], is_module: bool, guard: bool) -> dict[str, Any]:
    """What is run, where, with which versions."""
    return {
        "schema": SCHEMA,
        "script": target,
        "module": is_module,
        "arguments": list(arguments),
        "guard": guard,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "python": platform.python_version(),
        "platform": sys.platform,
        "rank": int(os.environ.get("RANK", "0") or 0),
        "world_size": int(os.environ.get("WORLD_SIZE", "1") or 1),
    }


def _clean(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {str(key): _clean(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_clean(item) for item in value]
    return value
