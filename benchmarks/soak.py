"""A long run in a short time: memory, size of the folder, time per step and open files over many steps and restarts.

    python benchmarks/soak.py [--steps 200000] [--restarts 4] [--out docs/soak.svg]

A tiny model trains guarded, with a run log, checkpoints and recovery. The clock of the parts that count time is set by
the loop: every step takes `--seconds-per-step` (0.25 by default), so that 200,000 steps are 14 hours for them, and
10,000,000 steps four weeks. The run is ended and started again several times, each time in a process of its own that
continues from the last checkpoint, some steps back. At the end the log of all processes is read as one run.

Prints the figures of the second and the last fifth of each process, and draws the curves. Ends with 1 if memory or open
files grow by more than `--tolerance`, if a step costs more than it did, if the log lacks steps, or if anything was
reported. The cost of a step is measured in three ways that other programs on the machine do not disturb:

- function calls of the main thread, of Python and of C, counted over `COUNTED_STEPS` steps in a row, which contain the
  same number of snapshots each time. They are the same on every machine; they may grow by `CALLS_TIMES`;
- bytes that the process writes per step. They may grow by `--tolerance`. Most of them belong to checkpoints, so parts
  of a process are compared that contain the same number of them (`CHECKPOINT_MINUTES`); a process that is too short for
  five such parts, 12,000 steps by default, is not judged by its bytes;
- CPU time of the process, all threads together, over the CPU time of plain steps of the same model without surefoot
  (`PlainSteps`). The two take turns every few dozen steps, so that a busy machine slows both alike. This also shows a C
  function that takes longer from call to call. It may grow by `TIME_TIMES`.

With `--log-only` the run log is fed with rows and no model is trained: a way to write ten million steps in minutes.

Left out: a real model. What one step of a large model costs is in `guarded_step.py` and `log_cost.py`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import surefoot as sf
from surefoot.build.line_chart import Chart, ChartSeries, to_svg
from surefoot.guard import log_rows
from surefoot.keep.checkpoint import manager
from surefoot.record import loader_waits, progress_alarms, writer
from surefoot.record.messages import StepRow

if TYPE_CHECKING:
    from collections.abc import Callable

MEASURES_PER_PROCESS = 40
CHECKPOINT_MINUTES = 10
PARTS = 5
"""The second and the last of this many parts of a process are compared."""
COUNTED_STEPS = 100
"""Steps whose function calls are counted, at the end of each part of a process. A multiple of what recurs."""
CALLS_TIMES = 1.01
"""What the function calls per step may grow by."""
TIME_TIMES = 1.25
"""What the CPU time per step may grow by, in units of plain steps: eleven busy programs on two cores change it by a
tenth."""
STEPS_IN_TURN, PLAIN_STEPS_IN_TURN = 50, 10
CHART_WIDTH, CHART_HEIGHT = 860, 360


class SetClock:
    """Stands in for `time` where surefoot counts time: it advances when the loop says so."""

    sleep, strftime, localtime, perf_counter = time.sleep, time.strftime, time.localtime, time.perf_counter

    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def time(self) -> float:
        return self.now

    monotonic = time


@dataclass(frozen=True)
class Measure:
    """One look at a process."""

    step: int
    process: int
    memory_mib: float
    folder_mib: float
    open_files: int
    step_us: float
    """CPU time per step."""
    plain_steps: float
    """… over the CPU time of a plain step."""
    calls: float
    """Function calls of the main thread per step."""
    written: float
    """Bytes that the process has written per step, to whatever file."""


class PlainSteps:
    """Steps of the same model without surefoot: what a step costs at this moment on this machine."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self._model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-6)
        self._rows = torch.randn(16, 8, generator=generator)

    def take(self, count: int) -> float:
        """CPU seconds of this thread for so many steps."""
        began = time.thread_time()
        for _ in range(count):
            (self._model(self._rows) - self._rows.sum(1, keepdim=True)).square().mean().backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
        return time.thread_time() - began


class CostMeter:
    """What the steps of one process cost: each part of it begins with `begin` and ends with `end`."""

    def __init__(self, folder: Path, process: int, step_once: Callable[[int], None]) -> None:
        self._folder, self._process, self._step_once = folder, process, step_once
        self._plain = PlainSteps()
        self._plain.take(PLAIN_STEPS_IN_TURN)  # the first ones allocate
        self.begin()

    def begin(self) -> None:
        self._began, self._written = time.process_time(), _bytes_written()
        self._plain_seconds, self._plain_count, self._count, self._calls = 0.0, 0, 0, 0

    def take(self, step: int) -> None:
        """Take a step, and some plain ones now and then."""
        self._step_once(step)
        self._count += 1
        if self._count % STEPS_IN_TURN == 0:
            self._plain_seconds += self._plain.take(PLAIN_STEPS_IN_TURN)
            self._plain_count += PLAIN_STEPS_IN_TURN

    def take_counted(self, step: int) -> None:
        """Take a step and count its function calls; its time does not count."""
        began, calls = time.process_time(), 0

        def count(frame: object, event: str, argument: object) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            self._step_once(step)
        finally:
            sys.setprofile(None)
        self._calls += calls
        self._began += time.process_time() - began

    def end(self, step: int, counted: int) -> Measure:
        used = (time.process_time() - self._began - self._plain_seconds) / self._count
        plain = self._plain_seconds / self._plain_count
        steps = self._count + counted
        return Measure(
            step,
            self._process,
            int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20,
            sum(file.stat().st_size for file in self._folder.rglob("*") if file.is_file()) / 2**20,
            len(os.listdir("/proc/self/fd")),
            1e6 * used,
            used / plain,
            self._calls / counted,
            (_bytes_written() - self._written) / steps,
        )


def _bytes_written() -> int:
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["wchar"])


def train(folder: Path, until: int, process: int, seconds_per_step: float, total: int, log_only: bool) -> None:
    """Continue the run to step `until`, and print a measure now and then."""
    clock = SetClock()
    clock.now += 1e8 * process
    for module in (log_rows, manager, progress_alarms, loader_waits, writer):
        module.time = clock  # type: ignore[assignment]
    log = sf.RunLog(folder / "log")
    step_once, first = log_rows_only(folder, log, clock) if log_only else guarded_loop(folder, log, total)
    every = max(STEPS_IN_TURN + COUNTED_STEPS, (until - first) // MEASURES_PER_PROCESS)
    checkpoint = checkpoint_steps(seconds_per_step)
    if until - first >= PARTS * checkpoint:
        every = checkpoint * -(-every // checkpoint)
    cost = CostMeter(folder, process, step_once)
    for step in range(first, until):
        clock.now += seconds_per_step
        place = (step - first) % every
        (cost.take if place < every - COUNTED_STEPS else cost.take_counted)(step)
        while len(log._writer.waiting) > 8192:  # the log of a real run is not fed thousands of steps a second
            time.sleep(0.01)
        if place == every - 1:
            print(json.dumps(asdict(cost.end(step + 1, COUNTED_STEPS))), flush=True)
            cost.begin()
    log.close(timeout=60)
    sys.stdout.flush()
    os._exit(0)  # without what is done at exit: the next process begins at the last checkpoint, some steps back


def guarded_loop(folder: Path, log: sf.RunLog, total: int) -> tuple[Callable[[int], None], int]:
    """One guarded step, and the step to begin with."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(1024, 8)
    stabilizer = sf.TrainingStabilizer(
        model,
        optimizer,
        scheduler=sf.warmup_cosine(optimizer, warmup_steps=1000, total_steps=total),
        clip=sf.ClipByNorm(1.0),
        checkpoints=sf.CheckpointManager(folder / "checkpoints", every_steps=None, every_minutes=CHECKPOINT_MINUTES),
        recovery=sf.TrainingRecovery(),
        log=log,
    )

    def step_once(step: int) -> None:
        rows = x[(step * 16) % 1008 : (step * 16) % 1008 + 16]
        loss = (model(rows) - rows.sum(1, keepdim=True)).square().mean()
        stabilizer.backward(loss)
        stabilizer.observe(mean=rows.mean())
        stabilizer.step()

    return step_once, stabilizer.restore() or 0


def log_rows_only(folder: Path, log: sf.RunLog, clock: SetClock) -> tuple[Callable[[int], None], int]:
    """One row of the log, and the step to begin with: some steps before the end of the process before."""
    told = folder / "last-step"
    first = max(0, int(told.read_text()) - 100) if told.exists() else 0
    if first:
        log.event("resume", first, f"goes on from step {first:,}")

    def step_once(step: int) -> None:
        noise = math.sin(step) + math.sin(1.7 * step)
        log.take(
            StepRow(step, clock.now, loss=2.0 + 0.1 * noise, grad_norm=1.0 + 0.2 * noise, lr=1e-3, clip_factor=1.0)
        )
        if step % 10_000 == 9_999:
            log.event("checkpoint", step, "saved")
            told.write_text(str(step))

    return step_once, first


COLUMNS = {
    "memory_mib": "memory MiB",
    "folder_mib": "folder MiB",
    "open_files": "open files",
    "step_us": "CPU µs per step",
    "plain_steps": "… in plain steps",
    "calls": "calls per step",
    "written": "bytes per step",
}


def checkpoint_steps(seconds_per_step: float) -> int:
    """The number of steps between two checkpoints."""
    return math.ceil(60 * CHECKPOINT_MINUTES / seconds_per_step)


def report(measures: list[Measure], tolerance: float, checkpoint: int) -> bool:
    """Print the figures, and what grows beyond its limit; whether all of them stay flat."""
    limits = dict.fromkeys(("memory_mib", "open_files", "written"), 1 + tolerance)
    limits |= {"plain_steps": TIME_TIMES, "calls": CALLS_TIMES}  # the folder has a limit of its own
    too_large = []
    print(f"{'process':>8} {'steps':>20} " + " ".join(f"{title:>18}" for title in COLUMNS.values()))
    for process in sorted({each.process for each in measures}):
        mine = [each for each in measures if each.process == process]
        fifth = max(1, len(mine) // PARTS)
        judged = set(limits)
        if len(mine) < PARTS or mine[1].step - mine[0].step < checkpoint:
            judged.remove("written")
            print(f"process {process + 1} is too short to judge its bytes per step: a checkpoint in {checkpoint} steps")
        early, late = mine[fifth : 2 * fifth], mine[-fifth:]
        cells = []
        for name in COLUMNS:
            before, after = (statistics.median(getattr(each, name) for each in part) for part in (early, late))
            cells.append(f"{before:7.1f} -> {after:7.1f}")
            if name in judged and after > limits[name] * before:
                change = f"x {after / before:.2f}" if before else f"{before:g} -> {after:.3g}"
                too_large.append(f"process {process + 1}: {COLUMNS[name]} {change}, above x {limits[name]}")
        span = f"{mine[0].step:,} - {mine[-1].step:,}"
        print(f"{process + 1:>8} {span:>20} " + " ".join(f"{cell:>18}" for cell in cells))
    print(*too_large, sep="\n")
    return not too_large


def check_log(folder: Path, steps: int) -> bool:
    """Read the logs of all processes as one run; whether nothing is missing and nothing was reported."""
    run = sf.load_run(folder / "log")
    seen = run.scalars["step"].to_pylist()
    resumed = [event.step for event in run.events if event.event == "resume"]
    alarms = [event.summary for event in run.events if event.event == "alarm" and event.severity != "info"]
    whole = seen == sorted(set(seen)) and seen[0] == 0 and seen[-1] == steps - 1
    rows = f"{len(seen):,} rows kept"
    print(
        f"one run of {seen[-1] + 1:,} steps, {rows}, resumed at {resumed}, {run.dropped} rows dropped, "
        f"{len(alarms)} alarms, problems: {list(run.problems) or 'none'}"
    )
    for alarm in alarms[:5]:
        print("  alarm:", alarm)
    return whole and not alarms and not run.dropped and not run.problems


def draw(measures: list[Measure], out: Path, title: str) -> None:
    """The curves, one below the other, a line for each process."""
    names = {
        "memory_mib": "memory of the process, MiB",
        "folder_mib": "run folder, MiB",
        "open_files": "open files",
        "plain_steps": "CPU time per step, in steps without surefoot",
        "calls": "function calls per step",
    }
    charts = []
    for number, (name, label) in enumerate(names.items()):
        lines = tuple(
            ChartSeries(f"process {process + 1}", [each.step for each in mine], [getattr(each, name) for each in mine])
            for process in sorted({each.process for each in measures})
            if (mine := [each for each in measures if each.process == process])
        )
        svg = to_svg(Chart(label if number else f"{title}: {label}", "step", label, lines))
        place = f'<svg x="0" y="{number * CHART_HEIGHT}" width="{CHART_WIDTH}" height="{CHART_HEIGHT}" '
        charts.append(svg.replace("<svg ", place, 1))
    height = len(charts) * CHART_HEIGHT
    out.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {CHART_WIDTH} {height}">\n{"".join(charts)}</svg>\n'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--restarts", type=int, default=4)
    parser.add_argument("--seconds-per-step", type=float, default=0.25)
    parser.add_argument("--tolerance", type=float, default=0.1)
    parser.add_argument("--log-only", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        folder, until, process = given.one
        train(Path(folder), int(until), int(process), given.seconds_per_step, given.steps, given.log_only)
        return
    measures: list[Measure] = []
    with tempfile.TemporaryDirectory() as scratch:
        began = time.perf_counter()
        for process in range(given.restarts + 1):
            until = given.steps * (process + 1) // (given.restarts + 1)
            settings = ["--steps", str(given.steps), "--seconds-per-step", str(given.seconds_per_step)]
            settings += ["--log-only"] if given.log_only else []
            command = [sys.executable, __file__, *settings, "--one", scratch, str(until), str(process)]
            found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            measures += [Measure(**json.loads(line)) for line in found.stdout.splitlines() if line.startswith("{")]
        took, hours = time.perf_counter() - began, given.steps * given.seconds_per_step / 3600
        print(f"{given.steps:,} steps ({hours:,.1f} hours by the clock that is set) in {took:,.0f} s")
        flat = report(measures, given.tolerance, checkpoint_steps(given.seconds_per_step))
        whole = check_log(Path(scratch), given.steps)
    if given.out:
        draw(
            measures,
            given.out,
            f"{given.steps:,} steps{' of the log alone' * given.log_only}, {given.restarts} restarts",
        )
    sys.exit(0 if flat and whole else 1)


if __name__ == "__main__":
    main()
