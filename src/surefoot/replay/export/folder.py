"""The folder of a reproduction: its files, whether a folder may be used for one, and whether its script fails alone."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

from surefoot.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path


SCRIPT, TENSORS, README = "reproduce.py", "tensors.safetensors", "README.md"


def usable(folder: Path) -> Path:
    """The folder, if it does not exist, is empty, or contains a reproduction that may be replaced."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; a reproduction is a folder")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / SCRIPT).exists():
        raise UsageError(f"{folder} contains other files. Use an empty or new folder")
    return folder


def clear(folder: Path) -> None:
    """Remove the files of a reproduction."""
    for name in (SCRIPT, TENSORS, README):
        (folder / name).unlink(missing_ok=True)


_LONGEST_SECONDS = 300
_ALONE = """
import importlib.util, json, runpy, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "surefoot":
            raise ImportError("a reproduction must not need surefoot")

sys.meta_path.insert(0, Refuse())
if importlib.util.find_spec("torch") is None:  # a torch that only PYTHONPATH or the user's own site knows
    sys.path += json.loads(sys.argv[2])
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def fails_alone(folder: Path) -> tuple[bool, str]:
    """Whether the script fails exactly as recorded in a process that cannot import surefoot, and its last output."""
    command = [sys.executable, "-I", "-c", _ALONE, str(folder / SCRIPT), json.dumps(sys.path)]
    try:
        ended = subprocess.run(
            command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_LONGEST_SECONDS
        )
    except subprocess.TimeoutExpired:
        return False, f"it did not finish within {_LONGEST_SECONDS} seconds"
    said = (ended.stderr.strip() or ended.stdout.strip() or "nothing").splitlines()[-1]
    exactly = said.startswith("reproduced: ") and ", recorded were " not in said
    return ended.returncode == 1 and exactly, said
