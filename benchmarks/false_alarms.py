"""False alarms: every healthy run under `TrainingStabilizer` with default settings and recovery on.

    python benchmarks/false_alarms.py
    python benchmarks/false_alarms.py --steps 20000 --seeds 5 --only hinge_mostly_zero batch_of_four
    python benchmarks/false_alarms.py --total 1000000 --seeds 4 --jobs 16 --seconds 1500   # on a machine with 16 cores

Nothing is wrong with any of these runs, so every step that is not applied, every return, every halt and
every alarm above `info` is false. The kinds are added up in three groups: `open` ones, those `held out` while rules are
worked on (a third, chosen by a hash of the name), and `new` ones, which were written after the rules. With the first
seed, each run also trains in the bare loop, and without a clipper the parameters must come out the same, bit for bit
(`none` in the table: not compared). Every kind is run with the first seed before any is run with the second one. When
`--seconds` have passed, runs end where they are, and the table shows the steps that were taken. Kinds to which nothing
happened are not listed.
`--json` writes all runs to a file.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch
from healthy_runs import HEALTHY, group_of
from training_loops import Result, same_bits, train_bare, train_guarded


class Row(NamedTuple):
    """One run under one seed."""

    name: str
    steps: int
    """Optimizer steps of all its learners."""
    result: Result
    same_bits: bool | None
    """`None` with a clipper, whose arithmetic is not the bare loop's to the last bit, with later seeds, and if time was
    up."""


def measure(name: str, seed: int, steps: int, until: float, compares: bool) -> Row:
    """Train guarded, up to the time `until`; with `compares` also bare."""
    torch.set_num_threads(1)
    if time.time() > until:
        return Row(name, 0, Result([], []), None)
    run = HEALTHY[name]
    guarded = train_guarded(run, seed, steps, until=until)
    learners = run(seed, steps)
    clipped = any(learner.max_norm is not None for learner in learners)
    whole = compares and len(guarded.losses) == steps and time.time() < until
    same = same_bits(guarded, train_bare(run, seed, steps)) if whole and not clipped else None
    guarded.parameters = []
    return Row(name, len(guarded.losses) * len(learners), guarded, same)


def table(rows: list[Row]) -> list[str]:
    """One line per kind to which something happened, all seeds together, and the rate over everything."""
    counted = ("steps", "skipped", "returns", "stayed", "halts", "alarms")
    lines = [f"{'run':<30}{''.join(f'{name:>8}' for name in counted)}  bits  alarms"]
    for name in sorted({row.name for row in rows}):
        own = [row for row in rows if row.name == name]
        total = Total.of(own)
        compared = [row.same_bits for row in own if row.same_bits is not None]
        bits = "none" if not compared else "same" if all(compared) else "DIFF"
        kinds = [f"{kind} {count}" for kind, count in total.alarms.items()]
        if total.skipped or total.returns or total.halts or kinds or bits == "DIFF":
            numbers = (*total[:-1], total.alarms.total())
            lines.append(f"{name:<30}{''.join(f'{number:>8}' for number in numbers)}  {bits}  {', '.join(kinds)}")
    groups = ("open", "held out", "new")
    parts = {group: [row for row in rows if group_of(row.name) == group] for group in groups}
    return [*lines, *(_sum(f"{name}: ", part) for name, part in parts.items() if part), _sum("", rows)]


def _sum(title: str, rows: list[Row]) -> str:
    total = Total.of(rows)
    alarms = total.alarms.total()
    return (
        f"{title}{len({row.name for row in rows})} kinds, {len(rows)} runs, {total.steps:,} healthy steps: "
        f"{total.halts} halts, {total.returns} returns ({total.stayed} stayed), "
        f"{total.skipped} skipped steps ({_one_in(total.steps, total.skipped)}), "
        f"{alarms} alarms ({_one_in(total.steps, alarms)}), "
        f"{sum(row.same_bits is False for row in rows)} trainings off the bare loop"
    )


class Total(NamedTuple):
    """Counts over several runs."""

    steps: int
    skipped: int
    returns: int
    stayed: int
    """Returns that were not taken back."""
    halts: int
    alarms: Counter[str]

    @classmethod
    def of(cls, rows: list[Row]) -> Total:
        results = [row.result for row in rows]
        returns, undone = sum(each.returns for each in results), sum(each.taken_back for each in results)
        return cls(
            sum(row.steps for row in rows),
            sum(each.skipped for each in results),
            returns,
            returns - undone,
            sum(each.halted for each in results),
            _add(each.alarms for each in results),
        )


def _one_in(steps: int, count: int) -> str:
    return f"1 in {steps // count:,}" if count else "none"


def _add(counters: object) -> Counter[str]:
    return sum(counters, Counter())  # type: ignore[call-overload, no-any-return]


def _measured(tasks: list[tuple[str, int]], steps: int, jobs: int, seconds: float) -> list[Row]:
    """Every run, at most until `seconds` have passed. A run that something happened to is printed when it ends."""
    until, rows = time.time() + seconds, list[Row]()
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        first = tasks[0][1]
        for done in as_completed([pool.submit(measure, *task, steps, until, task[1] == first) for task in tasks]):
            row = done.result()
            rows.append(row)
            found = row.result
            if found.alarms or found.skipped or found.halted:
                text = f"{dict(found.alarms)}, {found.skipped} skipped, halted: {found.halted}"
                print(f"{row.name}: {text}", flush=True)
    return [row for row in rows if row.steps]


def _kept(result: Result) -> dict[str, object]:
    """The result without the losses and parameters."""
    return {name: value for name, value in vars(result).items() if name not in ("losses", "parameters")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000, help="optimizer steps of each run")
    parser.add_argument("--total", type=int, default=None, help="optimizer steps of all runs together, for --steps")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="processes, with one thread each")
    parser.add_argument("--seconds", type=float, default=86_400.0, help="end all runs after this time")
    parser.add_argument("--only", nargs="*", choices=sorted(HEALTHY), default=None, metavar="RUN")
    parser.add_argument("--incidents", action="store_true", help="print every alarm in full")
    parser.add_argument("--json", type=Path, default=None, help="a file for all runs")
    options = parser.parse_args()
    began = time.perf_counter()
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    tasks = [(name, seed) for seed, name in product(seeds, options.only or HEALTHY)]
    steps = options.steps if options.total is None else -(-options.total // len(tasks))
    rows = _measured(tasks, steps, options.jobs, options.seconds)
    if options.json is not None:
        options.json.write_text(json.dumps([row._asdict() | {"result": _kept(row.result)} for row in rows]))
    if options.incidents:
        print(*(f"{row.name}: {line}" for row in rows for line in row.result.incidents), sep="\n")
    print(*table(rows), sep="\n")
    print(f"{time.perf_counter() - began:.0f} s, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}")
    return int(any(row.result.alarms or row.result.skipped or row.result.halted for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
