"""`surefoot bisect` and `surefoot replay --experiments`: check the arguments, run the experiments, print the result.

Exit code 0: nothing to cure, or a cure was found. 1: no cure was found. 2: wrong use.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.core.console import result_console
from surefoot.errors import UsageError
from surefoot.experiments import plan, scratch_folder
from surefoot.experiments.bisect import bisect
from surefoot.experiments.processes import Subject
from surefoot.experiments.results import progress, show
from surefoot.experiments.sandbox import warn_if_unconfined
from surefoot.experiments.trials import default_jobs

if TYPE_CHECKING:
    from surefoot.experiments.results import Report
    from surefoot.replay.processes import Order

_OUR_OPTIONS = ("--budget", "--jobs", "--only", "--share", "--allow-writes")
"""Options that scripts rarely have."""


@dataclass(frozen=True)
class Options:
    """The options of both commands."""

    budget_s: float = 600.0
    """Seconds that all runs together may take."""
    jobs: int = 0
    """Runs at the same time; 0 uses `default_jobs`."""
    out: Path | None = None
    """The folder of the results; `None` creates one in `runs`."""
    only: str = ""
    """Names of changes, separated by commas; empty tries all."""
    as_json: bool = False
    share: tuple[Path, ...] = ()
    """Folders that the script only reads: they are not copied."""
    writable: tuple[Path, ...] = ()
    """Folders elsewhere that the script may write to."""


def run(script: str, arguments: tuple[str, ...], is_module: bool, options: Options) -> int:
    """Run the command; returns its exit code."""
    changes = plan.chosen(options.only)
    kept = scratch_folder.shared(options.share, Path.cwd())
    if not is_module and not os.path.exists(script):
        raise UsageError(f"no script at {script}. Expected a file such as train.py, or -m and a module.")
    folder = _folder(options.out, Path(script).stem or "script")
    if late := [each for each in arguments if each.partition("=")[0] in _OUR_OPTIONS]:
        print(
            f"surefoot: {late[0]} comes after {script} and is passed to it; options of bisect go before it",
            file=sys.stderr,
        )
    writable = scratch_folder.writable(options.writable)
    subject = Subject(script, arguments, is_module, share=kept, writable=writable)
    return _carry_out(partial(bisect, subject), folder, changes, options)


def run_on_incident(incident: Path, order: Order, options: Options) -> int:
    """The same for the step of an incident; `order` names the script or the target that runs it."""
    from surefoot.experiments.incident import CapturedIncident, experiment_on
    from surefoot.record.incidents.reading import read_facts
    from surefoot.replay.consent import import_path, received

    changes = plan.chosen(options.only)
    captured = CapturedIncident(incident, read_facts(incident), order.target)
    folder = _folder(options.out, f"incident-{incident.resolve().name}")
    subject = Subject(
        order.script or "",
        order.arguments,
        order.module,
        share=scratch_folder.shared(options.share, Path.cwd()),
        writable=scratch_folder.writable(options.writable),
        path=tuple(import_path(received(incident))),
    )
    return _carry_out(partial(experiment_on, captured, subject), folder, changes, options)


def _carry_out(experiment: Callable[..., Report], folder: Path, changes: list[plan.Change], options: Options) -> int:
    warn_if_unconfined()
    jobs = options.jobs or default_jobs()
    with ended_by_signals(), progress(len(changes) + 2, options.budget_s) as on_event:
        report = experiment(folder, changes, options.budget_s, jobs, on_event)
    return _answer(report, folder, options.as_json)


def _answer(report: Report, folder: Path, as_json: bool) -> int:
    if as_json:
        from surefoot.record.run_folder import as_json as text

        print(text({**report.as_json(), "findings": report.diagnosis.as_json()["findings"]}, indent=2))
    else:
        show(report, _short(folder), result_console())
    return 0 if report.answer in ("healthy", "no harm", "cured") else 1


def _folder(out: Path | None, name: str) -> Path:
    folder = out if out is not None else Path("runs") / f"bisect-{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = Path(os.path.abspath(folder))
    if (folder / "bisect.json").exists():
        raise UsageError(f"{folder} already contains a bisection. Set --out to another folder.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make the folder {folder}: {error.strerror}. Set --out to another one.") from None
    return folder


def _short(folder: Path) -> str:
    relative = os.path.relpath(folder)
    return str(folder) if relative.startswith("..") else relative


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Raise an exception on SIGTERM and similar signals, so that no run is left behind."""

    def leave(number: int, frame: Any) -> None:
        sys.exit(128 + number)

    names = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {number: signal.signal(number, leave) for number in names}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
