"""The target of `surefoot doctor TARGET`: the objects that a function of the user returns.

TARGET is `module:function` or `path/to/file.py:function`; a plain `path/to/file.py` is run and watched instead. The
function takes no arguments and returns model, loader, loss function and optimizer, as a tuple in this order, or as a
dict or an object with these names. `eval_loader`, `loss_of` and `clip` may be added by name.

It is not known which object of a plain script is the model and which the loss, so nothing can be tried on copies: the
recorded facts answer the ten steps, and those that need experiments are skipped, with a note. The script runs in its
own process, is interrupted when the time is up, and its run folder is deleted.
"""

from __future__ import annotations

import importlib
import importlib.util
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypedDict, cast

from surefoot.diagnose.engine import diagnose, load
from surefoot.doctor.checks import Check, Examination, Status, passed, skipped
from surefoot.errors import UsageError

if TYPE_CHECKING:
    from types import ModuleType

    from torch import nn

    from surefoot.diagnose.findings import Diagnosis, Finding
    from surefoot.record.facts import RunFacts


class TrainingParts(TypedDict, total=False):
    """What a target returned: the arguments of `examine`. Model and loader are always present."""

    model: nn.Module
    loader: Iterable[Any]
    """Batches to train on."""
    loss_fn: Any
    """The loss function, or one that takes model and batch."""
    optimizer: Any
    eval_loader: Iterable[Any] | None
    """Batches to evaluate on."""
    loss_of: Callable[..., Any] | None
    """Takes model and batch, and returns the loss."""
    clip: Any
    """The limit of the gradient norm, or a clipper."""


NAMES = ("model", "loader", "loss_fn", "optimizer")
EXTRAS = ("eval_loader", "loss_of", "clip")
_WAY_OUT = "Pass module:function, where function() returns model, loader, loss_fn, optimizer."


def examine_target(target: str, seconds: float) -> Examination:
    """Load what the target names and examine it."""
    from surefoot.doctor.examine import examine

    if ":" not in target and (target.endswith(".py") or Path(target).exists()):
        from surefoot.doctor.target import examine_script

        return examine_script(Path(target), seconds)
    subject = subject_of(_call(load_function(target), target), target)
    return examine(**subject, seconds=seconds)


def load_function(target: str) -> Any:
    """The function that `module:function` or `file.py:function` names."""
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise UsageError(f"got {target!r}, which is not a script. {_WAY_OUT}")
    found: Any = _load_file(Path(place)) if place.endswith(".py") else _load_module(place)
    for part in name.split("."):
        if not hasattr(found, part):
            near = [key for key, value in vars(found).items() if callable(value) and not key.startswith("_")][:5]
            listed = f"; it has {', '.join(near)}" if near else ""
            raise UsageError(f"{place!r} has no {part!r}{listed}. {_WAY_OUT}")
        found = getattr(found, part)
    if not callable(found):
        raise UsageError(f"{target!r} is a {type(found).__name__}, not a function. {_WAY_OUT}")
    return found


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UsageError(f"there is no file {str(path)!r}. {_WAY_OUT}")
    sys.path.insert(0, str(path.parent.resolve()))  # modules next to the file can be imported, as under python
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        _raise_as_usage(f"importing {str(path)!r}", error)
    return module


def _load_module(name: str) -> ModuleType:
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise UsageError(f"there is no module {name!r} here. {_WAY_OUT}") from error
        _raise_as_usage(f"importing {name!r}", error)
    except Exception as error:
        _raise_as_usage(f"importing {name!r}", error)


def _call(function: Any, target: str) -> Any:
    try:
        return function()
    except Exception as error:
        _raise_as_usage(f"calling {target!r} without arguments", error)


def _raise_as_usage(doing: str, error: Exception) -> NoReturn:
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    line = (str(error).strip().splitlines() or [""])[0]
    raise UsageError(f"{doing} raised {type(error).__name__}{where}: {line}. Make that run first.") from error


def subject_of(returned: Any, target: str) -> TrainingParts:
    """Model, loader and the rest, from whatever the function returned."""
    if isinstance(returned, Mapping):
        subject = {name: returned[name] for name in (*NAMES, *EXTRAS) if name in returned}
    elif isinstance(returned, tuple | list) and not hasattr(returned, "model"):
        if not 2 <= len(returned) <= len(NAMES):
            raise UsageError(f"{target!r} returned {len(returned)} values, expected 2 to 4. {_WAY_OUT}")
        subject = dict(zip(NAMES, returned, strict=False))
    else:
        subject = {name: getattr(returned, name) for name in (*NAMES, *EXTRAS) if hasattr(returned, name)}
    missing = [name for name in ("model", "loader") if name not in subject]
    if missing:
        raise UsageError(f"{target!r} returned a {type(returned).__name__} without {' and '.join(missing)}. {_WAY_OUT}")
    return cast("TrainingParts", subject)


_CLIPPING = 7
_COVERS: dict[int, tuple[str, tuple[str, ...], str]] = {
    1: (
        "labels and tokens",
        ("data.label-out-of-range", "data.token-mismatch", "loss.no-valid-targets"),
        "no label or id out of range, no batch without targets",
    ),
    2: ("output and loss", ("loss.*",), "no output or target that does not fit the loss function"),
    4: (
        "wiring",
        ("optim.*", "model.unregistered-parameters", "model.eval-mode-training", "model.train-mode-eval"),
        "no parameter without gradient, optimizer or change, and no wrong mode of the model",
    ),
    5: (
        "learning rate",
        ("lr.*", "accum.*", "rl.*", "gan.*"),
        "no updates that are too large or too small for the weights",
    ),
    6: ("init and norm", ("init.*", "model.*"), "no layer with an unusual scale of outputs or gradients"),
    _CLIPPING: ("clipping", ("clip.*",), "no clipping that limits most steps, or of scaled gradients"),
    8: ("precision", ("precision.*",), "no overflow or underflow in half precision"),
    9: ("kept graphs", ("memory.*",), "no graph that is kept from step to step"),
    10: (
        "data",
        ("data.*", "mask.*", "resume.*"),
        "no batch that is not finite, far from the others, sorted or repeated",
    ),
}
"""The name of each step here, its causes, and the result if none of them was found.

A cause belongs to the first step that names it.
"""

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
    return Examination(tuple(_checks(found, facts)), time.monotonic() - started, tuple(notes))


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


def _checks(found: Diagnosis, facts: RunFacts) -> list[Check]:
    serious = [finding for finding in found.findings if finding.severity != "info"]
    checks = [skipped(3, "overfits a tiny batch", f"needs the objects of the script. {_WAY_OUT}")]
    if not found.steps:
        serious = [finding for finding in serious if finding.step is not None]
    for step, (name, _, sound) in _COVERS.items():
        mine = [finding for finding in serious if _step_of(finding.cause) == step]
        if mine:
            checks.extend(_check(step, f"{name}: {finding.cause}", finding) for finding in mine)
        elif step == _CLIPPING and found.steps and not facts.clippings:
            checks.append(skipped(step, name, "the script clips no gradients"))
        elif found.steps:
            checks.append(passed(step, name, sound))
        else:
            checks.append(skipped(step, name, "the script took no optimizer step"))
    return sorted(checks, key=lambda check: check.step)


def _step_of(cause: str) -> int:
    for step, (_, patterns, _) in _COVERS.items():
        if any(cause == p or (p.endswith("*") and cause.startswith(p[:-1])) for p in patterns):
            return step
    return 10


def _check(step: int, name: str, finding: Finding) -> Check:
    status: Status = "fail" if finding.severity == "error" else "warn"
    fix = finding.fixes[0] if finding.fixes else ""
    return Check(step, name, status, finding.summary, round(finding.confidence, 2), "", fix, finding.cause)
