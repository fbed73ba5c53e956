"""`surefoot watch DIR`: follow a run from another terminal through the files it writes.

Only files are read, so the run may be on another machine that shares the disk, may not have begun yet, or may be killed
and resumed. The folder is read twice a second. In a terminal, the view fills the screen until the run ends or you press
`q` or Ctrl-C; the last view stays on the screen. Elsewhere, plain lines are printed at intervals.

With several ranks (`DIR/rank0`, `DIR/rank1`, …), the first is shown in full and the others on a line each, and the
slowest is named. Their merged diagnosis is shown when every rank has ended.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.core.files import read_file
from surefoot.core.formats import FINDINGS, RUN
from surefoot.errors import UsageError
from surefoot.record.messages import Batch, Event, StepRow
from surefoot.report.page.source import merged_findings
from surefoot.report.run_view import RunView
from surefoot.report.terminal.formatting import as_ascii, duration, number, one_line
from surefoot.report.terminal.lines import can_show_blocks, finished_lines, rule, view_lines
from surefoot.report.terminal.plain import PlainLines

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from surefoot.record.follow import RunFollower

_READ_SECONDS = 0.5
_PAUSE_FACTOR = 4
"""The pause after reading the folder, in multiples of the time that reading took."""
_LONGEST_PAUSE = 5.0
"""In seconds. On a busy machine, reading may take long; the view is still updated at least this often."""
_VERDICT_SECONDS = 3.0
"""How long after the end of a run to wait for its diagnosis."""
_MOST_RANKS = 16
_EVENTS = 8
_FINDINGS = 3
_NUMBERS = ("loss", "grad_norm", "clip_factor", "lr", "loss_scale", "nonfinite")
_VERDICT_STYLE = {"healthy": "bold green", "unstable": "bold yellow", "broken": "bold red"}


def _pause_after(began: float) -> float:
    """The pause after a reading that began at this time."""
    return min(max(_READ_SECONDS, _PAUSE_FACTOR * (time.monotonic() - began)), _LONGEST_PAUSE)


class WatchedRun:
    """One run folder, and what has been read from it so far."""

    def __init__(self, folder: Path) -> None:
        from surefoot.record.follow import RunFollower

        self.folder = folder
        self.view = RunView()
        self.findings: Mapping[str, Any] | None = None
        self._follower: RunFollower = RunFollower(folder)
        self._over_since: float | None = None

    def read(self) -> Sequence[Event]:
        """Read what is new; returns the new events."""
        news = self._follower.poll()
        known = 0
        if news.restarted:
            seen = self.view.events.seen
            known = seen if len(news.events) >= seen else 0
            self.view = RunView(total_steps=_planned_steps(self.folder))
        self.view.add(Batch(steps=step_rows(news.scalars), events=news.events))
        self.findings = _findings_of(self.folder, self.view)
        return news.events[known:]

    def is_finished(self, now: float) -> bool:
        """Whether nothing more will come: there is a diagnosis, or the run ended without one."""
        if self.findings is not None:
            return True
        if not self.view.over:
            self._over_since = None
            return False
        self._over_since = now if self._over_since is None else self._over_since
        return now - self._over_since >= _VERDICT_SECONDS


def step_rows(scalars: Any) -> list[StepRow]:
    """The rows of a table of scalars, as messages."""
    names = ["step", "time", "part", *_NUMBERS, "skipped"]
    columns = [scalars.column(name).to_pylist() for name in names]
    return [
        StepRow(step, seen, part or "", skipped=bool(skipped), **dict(zip(_NUMBERS, numbers, strict=True)))
        for step, seen, part, *numbers, skipped in zip(*columns, strict=True)
    ]


def run_folders(folder: Path) -> list[Path]:
    """The folder itself, or those of its ranks, in order."""
    ranks = {}
    with suppress(OSError):
        for path in folder.iterdir():
            found = re.fullmatch(r"rank(\d+)", path.name)
            if found and path.is_dir():
                ranks[int(found[1])] = path
    return [ranks[rank] for rank in sorted(ranks)] or [folder]


def watch(folder: str | Path, once: bool = False) -> None:
    """Show a run until it ends."""
    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path} is a file; expected a run folder, as `surefoot run --out DIR` creates it.")
    if sys.stdout is None:
        raise UsageError("`surefoot watch` cannot write: its standard output is closed.")
    watcher = RunFollowerView(path)
    if once:
        watcher.read()
        if not watcher.has_begun:
            raise UsageError(f"no run at {path} yet. Without --once, `surefoot watch` waits for it.")
        watcher.print_view()
        return
    with suppress(KeyboardInterrupt), ended_by_signal():
        watcher.follow()


class RunFollowerView:
    """The run, or the runs of all ranks, and how they are shown."""

    def __init__(self, folder: Path) -> None:
        from rich.console import Console

        self.folder = folder
        self.runs: list[WatchedRun] = []
        self.console: Console = Console(highlight=False, markup=False, emoji=False)
        self._ascii = not can_show_blocks(sys.stdout.encoding)
        self._plain = PlainLines(ascii_only=self._ascii)
        self._merged: Mapping[str, Any] | None = None
        """The merged diagnosis of several ranks."""

    @property
    def has_begun(self) -> bool:
        """Whether there is anything to show."""
        return any(run.view.started is not None or run.findings is not None for run in self.runs)

    def read(self) -> Sequence[Event]:
        """Read what is new in every folder; returns the new events of the first."""
        folders = run_folders(self.folder)
        if [run.folder for run in self.runs] != folders:
            known = {run.folder: run for run in self.runs}
            self.runs = [known.get(path) or WatchedRun(path) for path in folders]
        first, *_ = [run.read() for run in self.runs]
        return first

    def follow(self) -> None:
        """Show the run until it ends or the user quits."""
        if self.console.is_terminal and not self.console.is_dumb_terminal:
            if self._follow_on_screen():
                self.print_view()
        else:
            self._follow_in_lines()

    def print_view(self) -> None:
        """Print the current view once."""
        console = self.console
        for line in self._lines(console.width if console.is_terminal else 100, None):
            console.print(line, soft_wrap=True)

    def _follow_on_screen(self) -> bool:
        """Fill the screen until the run ends; returns whether it has."""
        from rich.live import Live
        from rich.text import Text

        with keys_of_terminal() as keys, Live(console=self.console, screen=True, auto_refresh=False) as live:
            while True:
                began = time.monotonic()
                self.read()
                lines = self._lines(self.console.width, self.console.height)
                live.update(Text("\n").join(lines), refresh=True)
                if self._finished():
                    return True
                if keys.asked_to_quit(_pause_after(began)):
                    return False

    def _follow_in_lines(self) -> None:
        self._print(f"watching {self.folder}")
        waiting = False
        while True:
            began = time.monotonic()
            events = self.read()
            view = self.runs[0].view
            if not self.has_begun and not waiting:
                waiting = True
                self._print(f"no run at {self.folder} yet; waiting for it to begin")
            for line in self._plain.lines(view, events, time.time()):
                self._print(line)
            if self._finished():
                break
            time.sleep(_pause_after(began))
        for line in [*self._plain.last_line(view, time.time()), *(text.plain for text in self._verdict(10_000))]:
            self._print(line)

    def _print(self, line: str) -> None:
        print(as_ascii(line) if self._ascii else line, flush=True)

    def _finished(self) -> bool:
        return all(run.is_finished(time.monotonic()) for run in self.runs)

    def _lines(self, width: int, height: int | None) -> list[Text]:
        """The whole view, limited to `height` lines if given."""
        now, view = time.time(), self.runs[0].view
        head = rule(one_line(self.folder), width, self._ascii)
        if not self.has_begun:
            text = f"no run at {one_line(self.folder)} yet; waiting for it to begin · q to quit"
            return [*head, *finished_lines([[(text, "dim")]], width, self._ascii)]
        foot = [*self._rank_lines(width, now), *self._verdict(width)]
        events = _EVENTS if height is None else max(1, min(_EVENTS, height - len(foot) - 8))
        lines = [*head, *view_lines(view, now, width, events=events, ascii_only=self._ascii), *foot]
        return lines if height is None else lines[:height]

    def _rank_lines(self, width: int, now: float) -> list[Text]:
        others = self.runs[1:_MOST_RANKS]
        lines = []
        longest = max((len(run.folder.name) for run in others), default=0)
        for run in others:
            view = run.view
            loss = view.lead.loss if view.lead else None
            name = f"{run.folder.name:<{longest}}"
            text = f"{name}  step {view.step or 0:,}  loss {number(loss)}  skips {view.tallies['skips']:,}"
            quiet = view.quiet_for(now)
            late = f"  no new step for {duration(quiet)}" if view.is_stalled(now) else ""
            lines.append([(text, "dim"), (late, "yellow"), (f"  {view.state}" if view.over else "", "")])
        left_out = len(self.runs) - 1 - len(others)
        if left_out > 0:
            lines.append([(f"and {left_out:,} more ranks", "dim")])
        slowest = slowest_rank(self.runs)
        return finished_lines([*lines, *([[(slowest, "")]] if slowest else [])], width, self._ascii)

    def _verdict(self, width: int) -> list[Text]:
        """The diagnosis, if there is one; for several ranks, when all have ended."""
        held, folder = self._findings()
        if held is None:
            return []
        verdict = one_line(held.get("verdict", "no verdict"))
        lines = [[("finished: ", ""), (verdict, _VERDICT_STYLE.get(verdict, "bold"))]]
        if verdict == "unknown":
            lines.append([(f"  {one_line(held.get('summary', ''))}", "")])
        findings = [finding for finding in held.get("findings") or [] if isinstance(finding, dict)]
        for finding in [finding for finding in findings if finding.get("severity") != "info"][:_FINDINGS]:
            cause, words = one_line(finding.get("cause", "")), one_line(finding.get("summary", ""))
            lines.append([(f"  {cause}: ", "bold"), (words, "")])
        lines.append([(f"  more: surefoot diagnose {one_line(folder)}", "dim")])
        return finished_lines(lines, width, self._ascii)

    def _findings(self) -> tuple[Mapping[str, Any] | None, Path]:
        """The diagnosis of the run, and its folder."""
        if len(self.runs) == 1:
            return self.runs[0].findings, self.runs[0].folder
        if self._merged is None and all(run.findings is not None for run in self.runs):
            self._merged = merged_findings([run.folder for run in self.runs])
        return self._merged, self.folder


def slowest_rank(runs: Sequence[WatchedRun]) -> str:
    """The rank that is furthest behind, or, if all are at the same step, the one with the fewest steps per second."""
    going = [run for run in runs if run.view.step is not None and not run.view.over]
    if len(going) < 2:
        return ""
    steps = {run.folder.name: run.view.step or 0 for run in going}
    last = min(steps, key=lambda name: steps[name])
    behind = max(steps.values()) - steps[last]
    paces = {run.folder.name: pace for run in going if (pace := run.view.steps_per_second)}
    if behind > 1:
        return f"slowest: {last}, step {steps[last]:,}, {behind:,} steps behind"
    if len(paces) < 2:
        return ""
    slow = min(paces, key=lambda name: paces[name])
    return f"slowest: {slow}, {number(paces[slow])} steps per second; the fastest makes {number(max(paces.values()))}"


def _findings_of(folder: Path, view: RunView) -> Mapping[str, Any] | None:
    """The diagnosis, unless the run has continued since it was made."""
    path = folder / "findings.json"
    try:
        if view.last_time is not None and path.stat().st_mtime < view.last_time - _VERDICT_SECONDS:
            return None
        found = json.loads(read_file(path))
    except (OSError, ValueError, RecursionError):
        return None
    return FINDINGS.read(found, str(path), unmarked=1) if isinstance(found, dict) else None


def _planned_steps(folder: Path) -> int | None:
    try:
        run = json.loads(read_file(folder / "run.json"))
        planned = RUN.read(run, "run.json", ValueError, unmarked=1)["total_steps"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return planned if isinstance(planned, int) and planned > 0 else None


class Keys:
    """Keys typed while the view is shown."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    def asked_to_quit(self, seconds: float) -> bool:
        """Wait this long, or until `q` is typed; returns whether it was."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if self._descriptor is None:
                time.sleep(left)
            elif select.select([self._descriptor], [], [], left)[0]:
                typed = os.read(self._descriptor, 64)
                if b"q" in typed.lower() or not typed:  # empty: the terminal is closed
                    return True
        return False


@contextmanager
def keys_of_terminal() -> Iterator[Keys]:
    """Read keys one by one without echo, if stdin is a terminal; its settings are restored afterwards."""
    try:
        import termios
        import tty

        descriptor = sys.stdin.fileno()
        before = termios.tcgetattr(descriptor)
    except Exception:  # no terminal (`termios.error` is an Exception of its own), no stdin, or Windows
        yield Keys(None)
        return
    tty.setcbreak(descriptor)
    try:
        yield Keys(descriptor)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


@contextmanager
def ended_by_signal() -> Iterator[None]:
    """Exit on SIGTERM in a way that restores the screen."""

    def end(number: int, _frame: object) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
