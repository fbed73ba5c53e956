"""Run a reproduction in a fresh process that cannot import surefoot, and check that it fails as recorded."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

from surefoot.replay.export.folder import SCRIPT

if TYPE_CHECKING:
    from pathlib import Path

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


def fails_alone(folder: Path, seconds: float = 300.0) -> tuple[bool, str]:
    """Whether the script of a folder fails exactly as recorded, and its last output."""
    command = [sys.executable, "-I", "-c", _ALONE, str(folder / SCRIPT), json.dumps(sys.path)]
    try:
        ended = subprocess.run(
            command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return False, f"it did not finish within {seconds:g} seconds"
    said = (ended.stderr.strip() or ended.stdout.strip() or "nothing").splitlines()[-1]
    exactly = said.startswith("reproduced: ") and ", recorded were " not in said
    return ended.returncode == 1 and exactly, said
