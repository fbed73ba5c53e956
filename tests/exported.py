"""Exported reproductions for the tests, and a process without surefoot that runs many of them at once."""

from __future__ import annotations

import json
import sys
import warnings
from typing import TYPE_CHECKING, Any

import torch
from nonfinite_faults import FAULTS

import patience
import surefoot

if TYPE_CHECKING:
    from pathlib import Path

BY_NAME = {fault.name: fault for fault in FAULTS}
_RUN_ALL = """
import contextlib, io, json, runpy, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("surefoot", "safetensors", "nonfinite_faults"):
            raise ImportError(name)

sys.meta_path.insert(0, Refuse())
told = {}
for script in sys.argv[1:]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            runpy.run_path(script, run_name="__main__")
            code = "it did not end by itself"
        except SystemExit as ending:
            code = ending.code
        except Exception as error:
            code = repr(error)
    told[script] = [code, out.getvalue()]
print(json.dumps(told))
"""


def export(name: str, folder: Path, **settings: Any) -> surefoot.Reproduction:
    """Export one of the faults, without the check in a process of its own."""
    torch.manual_seed(0)
    step = BY_NAME[name].build()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = surefoot.export_reproduction(step, folder, model=step.model, **{"check": False, **settings})
    assert made is not None
    return made


def run_alone(*scripts: Path) -> dict[Path, tuple[Any, str]]:
    """What each script exits with (0, or a sentence) and prints, in a process that has torch alone."""
    command = [sys.executable, "-I", "-c", _RUN_ALL, *map(str, scripts)]
    told = patience.run(command, check=True).stdout
    answers = json.loads(told.splitlines()[-1])
    return {script: tuple(answers[str(script)]) for script in scripts}
