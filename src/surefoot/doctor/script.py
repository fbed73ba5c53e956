"""The preflight of a plain script: it is run and watched for a while, and the recorded facts answer the ten steps.

It is not known which object of a script is the model and which the loss, so nothing can be tried on copies: the steps
that need experiments are skipped, with a note. The script runs in its own process, is interrupted when the time is up,
and its run folder is deleted.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from surefoot.diagnose.engine import diagnose, load
from surefoot.doctor.checks import Check, Examination, Status, passed, skipped
from surefoot.errors import UsageError

if TYPE_CHECKING:
    from surefoot.diagnose.findings import Diagnosis, Finding

_COVERS: dict[int, tuple[str, tuple[str, ...]]] = {
    1: ("labels and tokens", ("data.label-out-of-range", "data.token-mismatch", "loss.no-valid-targets")),
    2: ("output and loss", ("loss.*",)),
    4: ("wiring", ("optim.*", "model.unregistered-parameters", "model.eval-mode-training", "model.train-mode-eval")),
    5: ("learning rate", ("lr.*", "accum.*", "rl.*", "gan.*")),
    6: ("init and norm", ("init.*", "model.*")),
    7: ("clipping", ("clip.*",)),
    8: ("precision", ("precision.*",)),
    9: ("kept graphs", ("memory.*",)),
    10: ("data", ("data.*", "mask.*", "resume.*")),
}
"""The name of each step here, and its causes; a cause belongs to the first step that names it."""

_ENOUGH_STEPS = 20
_PATIENCE_S = 30.0


def examine_script(path: Path, seconds: float) -> Examination:
    """Watch a script for at most this many seconds and answer the ten steps from what was recorded."""
    if not path.is_file():
        raise UsageError(f"there is no file {str(path)!r}. Pass a script, or module:function.")
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        whole = _watch(path, Path(scratch), seconds)
        facts, description = load(scratch)
        found = diagnose(facts, description)
    notes = [
        f"the script ran for {found.steps} optimizer steps"
        + ("" if whole else f" and was interrupted after {seconds:g} s")
    ]
    if found.steps < _ENOUGH_STEPS:
        more = "" if whole else "; increase --seconds"
        notes.append(f"fewer than {_ENOUGH_STEPS} steps: later problems were not observed{more}")
    if whole and found.verdict == "unknown":
        notes.append(found.summary)
    return Examination(tuple(_checks(found)), time.monotonic() - started, tuple(notes))


def _watch(path: Path, folder: Path, seconds: float) -> bool:
    """Run the script under observation; returns whether it ended by itself."""
    command = [sys.executable, "-m", "surefoot", "run", "--out", str(folder), str(path)]
    process = subprocess.Popen(command, stdout=sys.stderr, stderr=subprocess.DEVNULL)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
    else:
        return True
    try:
        process.wait(_PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise UsageError(f"{str(path)!r} did not stop when interrupted after {seconds:g} s. {_WAY_OUT}") from None
    return False


_WAY_OUT = "Pass module:function, where function() returns model, loader, loss_fn, optimizer."


def _checks(found: Diagnosis) -> list[Check]:
    serious = [finding for finding in found.findings if finding.severity != "info"]
    checks = [skipped(3, "overfits a tiny batch", f"needs the objects of the script. {_WAY_OUT}")]
    if not found.steps:
        serious = [finding for finding in serious if finding.step is not None]
    for step, (name, _) in _COVERS.items():
        mine = [finding for finding in serious if _step_of(finding.cause) == step]
        if mine:
            checks.extend(_check(step, f"{name}: {finding.cause}", finding) for finding in mine)
        elif found.steps:
            checks.append(passed(step, name, f"no problem in {found.steps} steps"))
        else:
            checks.append(skipped(step, name, "the script took no optimizer step"))
    return sorted(checks, key=lambda check: check.step)


def _step_of(cause: str) -> int:
    for step, (_, patterns) in _COVERS.items():
        if any(cause == p or (p.endswith("*") and cause.startswith(p[:-1])) for p in patterns):
            return step
    return 10


def _check(step: int, name: str, finding: Finding) -> Check:
    status: Status = "fail" if finding.severity == "error" else "warn"
    fix = finding.fixes[0] if finding.fixes else ""
    return Check(step, name, status, finding.summary, round(finding.confidence, 2), "", fix, finding.cause)
