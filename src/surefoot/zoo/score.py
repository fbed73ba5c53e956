"""The scoreboard: run every script of the zoo, diagnose it from its run folder, compare with the truth.

A faulty run counts as top-1 if its truth is the first finding above `info`, as top-3 if it is among the first three
(where nothing is above `info`, all findings count). A healthy run with any finding above `info` is a false alarm. A run
without a diagnosis, or with the verdict `unknown`, is not judged: it is listed, and counts neither as a false alarm nor
as a run without one. Run folders that were kept can be scored again without running anything, which is how rules are
tuned.

`surefoot.zoo.rank_runs` starts the scripts for several ranks; their run folder holds one folder per rank, and one
diagnosis is made of them. `surefoot.zoo.device_runs` runs the scripts on another device. Those that cannot run there
are listed and not counted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surefoot.core.formats import SCORES
from surefoot.errors import UsageError
from surefoot.zoo import HALVES, HEALTHY, RANKS, Specimen
from surefoot.zoo.rank_runs import COUNT, run_ranks

TIMEOUT_S = 180.0
DEVICE_FILE = "device.json"
"""In the folder of a run on a device: which one, and the error if the script cannot run there."""


@dataclass
class Result:
    """What one run of one script came to."""

    half: str
    truth: str
    script: str
    seed: int
    named: list[str] = field(default_factory=list)
    """The findings that count, best first."""
    alarms: list[str] = field(default_factory=list)
    """Findings above `info`, with confidence and summary."""
    exit_code: int | None = None
    trouble: str = ""
    """Why there is no diagnosis."""
    unjudged: str = ""
    """Why the verdict is `unknown`; empty if it is another one."""
    unwatched: dict[str, str] = field(default_factory=dict)
    """Probes that failed while the script ran."""
    device: str = "cpu"
    """What the script ran on."""
    cannot_run: str = ""
    """The error of a script that cannot run on the device; it is not counted."""

    @property
    def name(self) -> str:
        """`testing/lr.too-high/char_lstm:100`."""
        return f"{self.half}/{self.truth}/{self.script}:{self.seed}"

    @property
    def faulty(self) -> bool:
        """Whether there is a cause to be named."""
        return self.truth != HEALTHY

    @property
    def judged(self) -> bool:
        """Whether there is a diagnosis whose verdict is not `unknown`; only such a run can have no false alarm."""
        return not self.trouble and not self.unjudged

    def among(self, count: int) -> bool:
        """Whether the truth is among the first findings."""
        return self.truth in self.named[:count]


def folder_of(root: Path, specimen: Specimen, seed: int) -> Path:
    """Where the run folder of one run lies under `root`."""
    return root / specimen.half / specimen.truth / specimen.path.stem / str(seed)


def run_all(
    chosen: list[Specimen],
    seeds: list[int],
    jobs: int,
    keep: Path | None = None,
    timeout_s: float = TIMEOUT_S,
    done: Callable[[Result], None] = lambda result: None,
) -> list[Result]:
    """Run every script with every seed, `jobs` at a time, and diagnose each."""
    with tempfile.TemporaryDirectory(prefix="surefoot-zoo-") as scratch:
        root = keep.absolute() if keep is not None else Path(scratch)
        with ThreadPoolExecutor(jobs) as pool:
            waiting = [pool.submit(_run_one, held, seed, root, timeout_s) for held in chosen for seed in seeds]
            found = []
            try:
                for future in as_completed(waiting):
                    found.append(future.result())
                    done(found[-1])
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    return sorted(found, key=lambda result: result.name)


def prepare(folder: Path) -> None:
    """Make a run folder, or remove the results of an earlier run from it."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in ("facts.json", "run.json", "findings.json", DEVICE_FILE):
        (folder / old).unlink(missing_ok=True)


def _run_one(specimen: Specimen, seed: int, root: Path, timeout_s: float) -> Result:
    folder = folder_of(root, specimen, seed)
    if specimen.half == RANKS:
        for rank in range(COUNT):
            prepare(folder / f"rank{rank}")
        trouble = run_ranks(specimen.path, seed, folder, timeout_s)
        return read(folder, specimen.half, specimen.truth, specimen.path.stem, seed, trouble)
    prepare(folder)
    source = str(Path(__file__).parents[2])
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")])),
    }
    command = [sys.executable, "-m", "surefoot", "run", "--out", str(folder), str(specimen.path), str(seed)]
    trouble = ""
    with tempfile.TemporaryDirectory(prefix="surefoot-zoo-cwd-") as place:
        try:
            ended = subprocess.run(
                command, cwd=place, env=environment, capture_output=True, text=True, timeout=timeout_s
            )
            (folder / "output.txt").write_text(ended.stdout + ended.stderr, encoding="utf-8")
            if not (folder / "facts.json").exists():
                last = (ended.stderr.strip().splitlines() or ["no output"])[-1]
                trouble = f"left no facts, exit code {ended.returncode}: {last}"
        except subprocess.TimeoutExpired:
            trouble = f"still running after {timeout_s:g} s"
    return read(folder, specimen.half, specimen.truth, specimen.path.stem, seed, trouble)


def recorded(root: Path, half: str = "both", only: str = "", seeds: Iterable[int] | None = None) -> Iterator[Result]:
    """Diagnose again what `--keep` left behind."""
    if not root.is_dir():
        raise UsageError(f"there is no folder {root}. Pass a folder that `surefoot zoo score --keep` wrote.")
    wanted = set(seeds) if seeds is not None else None
    for folder in sorted(root.glob("*/*/*/*")):
        part, truth, script, seed = folder.relative_to(root).parts
        known = (half == part or (half == "both" and part in HALVES)) and seed.isdigit()
        if known and only in f"{part}/{truth}/{script}" and (wanted is None or int(seed) in wanted):
            yield read(folder, part, truth, script, int(seed))


def read(folder: Path, half: str, truth: str, script: str, seed: int, trouble: str = "") -> Result:
    """Diagnose one run folder."""
    from surefoot.diagnose.engine import diagnose_folder, load

    result = Result(half, truth, script, seed, trouble=trouble)
    if (folder / DEVICE_FILE).exists():
        held = json.loads((folder / DEVICE_FILE).read_text(encoding="utf-8"))
        result.device, result.cannot_run = held["device"], held["cannot_run"]
    if trouble:
        return result
    try:
        facts, description = load(folder)
    except UsageError as error:
        result.trouble = str(error)
        return result
    diagnosis = diagnose_folder(folder)
    serious = [finding for finding in diagnosis.findings if finding.severity != "info"]
    result.named = [finding.cause for finding in serious or diagnosis.findings]
    result.alarms = [f"{f.severity} {f.cause} {f.confidence:.2f}: {f.summary}" for f in serious]
    result.unjudged = diagnosis.summary if diagnosis.verdict == "unknown" else ""
    result.exit_code = description.exit_code
    result.unwatched = dict(facts.problems)
    return result


def summary(results: list[Result]) -> dict[str, Any]:
    """The figures of one half; what cannot run on the device is left out."""
    results = [result for result in results if not result.cannot_run]
    faulty = [result for result in results if result.faulty]
    healthy = [result for result in results if not result.faulty]
    codes = {}
    for code in sorted({result.truth for result in faulty}):
        runs = [result for result in faulty if result.truth == code]
        codes[code] = {
            "runs": len(runs),
            "scripts": len({result.script for result in runs}),
            "top1": sum(result.among(1) for result in runs),
            "top3": sum(result.among(3) for result in runs),
            "instead": dict(Counter(_first(result) for result in runs if not result.among(1)).most_common()),
        }
    confused = Counter((result.truth, _first(result)) for result in faulty if not result.among(1))
    return {
        "faulty": len(faulty),
        "healthy": len(healthy),
        "top1": _share([result.among(1) for result in faulty]),
        "top3": _share([result.among(3) for result in faulty]),
        "false_alarms": sum(bool(result.alarms) for result in healthy),
        "unjudged": sum(not result.judged for result in healthy),
        "codes": codes,
        "confusions": [{"truth": t, "named": n, "runs": count} for (t, n), count in confused.most_common()],
    }


def _first(result: Result) -> str:
    if result.trouble:
        return "(no diagnosis)"
    return result.named[0] if result.named else "(nothing)"


def _share(hits: list[bool]) -> float | None:
    return sum(hits) / len(hits) if hits else None


def by_half(results: list[Result]) -> dict[str, list[Result]]:
    """The results of each half that has any."""
    found = {half: [result for result in results if result.half == half] for half in (*HALVES, RANKS)}
    return {half: held for half, held in found.items() if held}


def as_json(results: list[Result]) -> str:
    """Everything, for a file."""
    held = {
        "schema": SCORES.version,
        "device": devices(results),
        "halves": {half: summary(held) for half, held in by_half(results).items()},
        "cannot_run": [{"run": result.name, "error": result.cannot_run} for result in results if result.cannot_run],
        "runs": [vars(result) for result in results],
    }
    return json.dumps(held, indent=1)


def devices(results: list[Result]) -> str:
    """What the scripts ran on; of run folders that were kept, more than one may be named."""
    return ", ".join(sorted({result.device for result in results}))


def show(results: list[Result], console: Any) -> None:
    """Print the scoreboard."""
    for half, held in by_half(results).items():
        _show_half(half, held, console)
    unable = [f"{result.name}: {result.cannot_run}" for result in results if result.cannot_run]
    results = [result for result in results if not result.cannot_run]
    for title, lines in [
        ("cannot run on this device, not counted", unable),
        ("no diagnosis", [f"{result.name}: {result.trouble}" for result in results if result.trouble]),
        (
            "the script itself ended with an error",
            [f"{result.name}: exit code {result.exit_code}" for result in results if result.exit_code],
        ),
        ("not judged", [f"{result.name}: {result.unjudged}" for result in results if result.unjudged]),
        (
            "probes that failed",
            [f"{r.name}: {probe} ({why})" for r in results for probe, why in r.unwatched.items()],
        ),
    ]:
        if lines:
            console.print(f"\n[bold]{title}[/bold] ({len(lines)})")
            for line in lines:
                console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)


def _show_half(half: str, results: list[Result], console: Any) -> None:
    from rich.table import Table

    figures = summary(results)
    device = devices(results)
    results = [result for result in results if not result.cannot_run]
    console.print(
        f"\n[bold]{half}[/bold] on {device}: {figures['faulty']} faulty runs, top-1 {_percent(figures['top1'])}, "
        f"top-3 {_percent(figures['top3'])}; {_healthy_runs(results)}",
        highlight=False,
    )
    if figures["codes"]:
        table = Table("cause", "scripts", "runs", "top-1", "top-3", "named instead", box=None, pad_edge=False)
        for code, row in figures["codes"].items():
            instead = ", ".join(f"{name} ×{count}" for name, count in row["instead"].items())
            table.add_row(
                code, str(row["scripts"]), str(row["runs"]), _of(row["top1"], row), _of(row["top3"], row), instead
            )
        console.print(table)
    misses = [result for result in results if result.faulty and not result.among(1)]
    if misses:
        console.print("\n[bold]confusions[/bold] (truth -> named)")
        for row in figures["confusions"]:
            console.print(f"  {row['truth']} -> {row['named']}  ×{row['runs']}", markup=False, highlight=False)
        console.print("\n[bold]runs that missed[/bold]")
        for result in misses:
            line = f"  {result.name} -> {', '.join(result.named[:3]) or result.trouble or 'nothing'}"
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    alarms = [result for result in results if not result.faulty and result.alarms]
    if alarms:
        console.print("\n[bold]false alarms[/bold]")
        for result in alarms:
            for alarm in result.alarms:
                console.print(f"  {result.name}: {alarm}", markup=False, highlight=False, soft_wrap=True)


def _healthy_runs(results: list[Result]) -> str:
    """False alarms among the healthy runs that were judged, and the names of the runs that were not."""
    healthy = [result for result in results if not result.faulty]
    judged = [result for result in healthy if result.judged]
    count = f"{len(judged)} of {len(healthy)}" if len(judged) < len(healthy) else str(len(judged))
    text = f"{count} healthy runs judged, {sum(bool(result.alarms) for result in judged)} with a false alarm"
    others = ", ".join(f"{result.script}:{result.seed}" for result in healthy if not result.judged)
    return f"{text}; not judged: {others}" if others else text


def _of(count: int, row: dict[str, Any]) -> str:
    return f"{count}/{row['runs']}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"
