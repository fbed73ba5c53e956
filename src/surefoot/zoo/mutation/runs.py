"""Run parents and mutants, diagnose each run, and record the result as one line of JSON.

The scripts run side by side in forks of one process (`surefoot.zoo.fork_server`). Each line of the file is a
`MutantRun`; a line is added as soon as its run has ended. What a file already holds, for the same text of the script
and the same seed, is not run again, so an interrupted run continues where it stopped. Files of several machines are
joined by concatenation.

A line holds the diagnosis of the rules of its day. After a change of the rules, diagnose kept run folders again.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from surefoot.core.files import write_file
from surefoot.core.formats import MUTANTS
from surefoot.errors import UsageError
from surefoot.zoo.fork_server import ForkedRun, ForkServer
from surefoot.zoo.score import prepare

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from surefoot.diagnose.run import RecordedRun
    from surefoot.zoo.mutation import Mutant

FIRST_SEED = 100
_SOURCE = "mutant.py"
"""In the folder of a run that has ended: the text that was run."""


@dataclass(frozen=True)
class RunLosses:
    """What a run's losses say about how well it did."""

    comparable: bool = False
    """Whether the loss measures progress: not that of a policy, of two opponents, or of targets that a model makes."""
    start: float | None = None
    """The training loss at the start."""
    end: float | None = None
    """The training loss at the end; `None` if there is none that is finite."""
    held_out: float | None = None
    """The loss of the last evaluations, if the script computes one."""
    broke: bool = False
    """Whether a training loss was not finite."""


@dataclass(frozen=True)
class NamedFinding:
    """A finding above `info`, or a remark."""

    cause: str
    severity: str
    confidence: float


@dataclass(frozen=True)
class MutantRun:
    """What one run of one mutant, or of a parent, came to."""

    half: str
    parent: str
    operator: str
    """Empty for the parent itself."""
    strength: float | None
    seed: int
    digest: str
    """Of the text that was run."""
    verdict: str = ""
    findings: tuple[NamedFinding, ...] = ()
    """Best first."""
    exit_code: int | None = None
    trouble: str = ""
    """Why there is no diagnosis."""
    losses: RunLosses = RunLosses()
    seconds: float = 0.0

    @property
    def key(self) -> tuple[str, str, float | None, str, int]:
        """What identifies a run: the same key is not run twice."""
        return self.parent, self.operator, self.strength, self.digest, self.seed

    @property
    def serious(self) -> tuple[NamedFinding, ...]:
        """The findings above `info`."""
        return tuple(finding for finding in self.findings if finding.severity != "info")

    @property
    def named(self) -> list[str]:
        """The causes that count, best first: those above `info`; where there is none, all."""
        return [finding.cause for finding in self.serious or self.findings]

    @property
    def crashed(self) -> bool:
        """Whether the script ended with an error, or too late."""
        return bool(self.exit_code or self.trouble)

    def as_line(self) -> str:
        """The run as a line of the file."""
        return json.dumps({MUTANTS.key: MUTANTS.version, **asdict(self)})


def planned(mutant: Mutant, seed: int) -> MutantRun:
    """The run of a mutant with one seed, before it is made."""
    name = mutant.operator.name if mutant.operator is not None else ""
    return MutantRun(mutant.parent.half, mutant.parent.path.stem, name, mutant.strength, seed, mutant.digest)


def read_lines(path: Path) -> list[MutantRun]:
    """The runs that a file holds; a last line that was cut off is left out."""
    found = []
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            held = json.loads(line)
        except ValueError:
            if number < len(lines):
                raise UsageError(
                    f"line {number} of {path} is not JSON: expected what `surefoot zoo mutate --json` wrote."
                ) from None
            continue
        found.append(_from_json(MUTANTS.read(held, f"line {number} of {path}")))
    return found


def _from_json(held: dict[str, Any]) -> MutantRun:
    fields = {name: value for name, value in held.items() if name != MUTANTS.key}
    fields["findings"] = tuple(NamedFinding(**each) for each in fields["findings"])
    fields["losses"] = RunLosses(**fields["losses"])
    return MutantRun(**fields)


def folder_of(root: Path, mutant: Mutant, seed: int) -> Path:
    """Where the run folder of one run lies under `root`."""
    return root / mutant.parent.half / mutant.label / mutant.parent.path.stem / str(seed)


def kept(chosen: Iterable[Mutant], seeds: list[int], root: Path) -> list[MutantRun]:
    """Diagnose again what was kept of the chosen mutants, if it is of the same text."""
    found = []
    for mutant in chosen:
        for seed in seeds:
            folder = folder_of(root, mutant, seed)
            source = folder / _SOURCE
            if source.exists() and source.read_text(encoding="utf-8") == mutant.text:
                found.append(judged(planned(mutant, seed), folder))
    return found


def run_all(
    chosen: list[Mutant],
    seeds: list[int],
    jobs: int,
    timeout_s: float,
    keep: Path | None = None,
    done: Callable[[MutantRun], None] = lambda run: None,
    known: Iterable[MutantRun] = (),
) -> list[MutantRun]:
    """Run every mutant with every seed, unless its result is known, `jobs` at a time; the new results."""
    have = {run.key for run in known}
    wanted = [(mutant, seed) for mutant in chosen for seed in seeds if planned(mutant, seed).key not in have]
    found: list[MutantRun] = []
    if not wanted:
        return found
    with tempfile.TemporaryDirectory(prefix="surefoot-mutants-") as scratch, ForkServer(jobs) as server:
        root = keep.absolute() if keep is not None else Path(scratch, "runs")
        waiting: dict[str, tuple[Mutant, int, Path]] = {}
        for mutant, seed in wanted:
            place = Path(scratch, str(len(waiting)))
            place.mkdir()
            folder = folder_of(root, mutant, seed)
            waiting[str(place)] = mutant, seed, folder
            server.submit(_prepared(mutant, seed, folder, place, timeout_s))
        last = time.monotonic()
        for run, code in server.ended():
            mutant, seed, folder = waiting.pop(run.place)
            trouble = f"still running after {timeout_s:g} s" if code is None else ""
            took = time.monotonic() - last
            last = time.monotonic()
            found.append(replace(judged(planned(mutant, seed), folder, trouble), seconds=round(took, 2)))
            write_file(folder / _SOURCE, mutant.text)
            done(found[-1])
            shutil.rmtree(run.place, ignore_errors=True)
            if keep is None:
                shutil.rmtree(folder, ignore_errors=True)
    return found


def _prepared(mutant: Mutant, seed: int, folder: Path, place: Path, timeout_s: float) -> ForkedRun:
    prepare(folder)
    (folder / _SOURCE).unlink(missing_ok=True)
    script = place / mutant.parent.path.name
    script.write_text(mutant.text, encoding="utf-8")
    return ForkedRun(
        script=str(script),
        arguments=(str(seed),),
        place=str(place),
        output=str(folder / "output.txt"),
        run_folder=str(folder),
        timeout_s=timeout_s,
    )


def judged(run: MutantRun, folder: Path, trouble: str = "") -> MutantRun:
    """A planned run with what its folder says."""
    from surefoot.diagnose.engine import diagnose, load
    from surefoot.diagnose.run import RecordedRun

    if trouble:
        return replace(run, trouble=trouble)
    try:
        facts, description = load(folder)
    except UsageError as error:
        return replace(run, trouble=str(error))
    diagnosis = diagnose(facts, description)
    return replace(
        run,
        verdict=diagnosis.verdict,
        findings=tuple(NamedFinding(f.cause, f.severity, round(f.confidence, 3)) for f in diagnosis.findings),
        exit_code=description.exit_code,
        losses=_losses(RecordedRun(facts, description)),
    )


def _losses(run: RecordedRun) -> RunLosses:
    curve = run.curve
    if not curve.values:
        return RunLosses()
    sets: dict[tuple[int, str, int], list[float]] = {}
    for each in run.facts.evaluation_passes:
        sets.setdefault((each.number, each.function, each.rows), []).append(
            math.inf if each.loss is None else each.loss
        )
    last = max(sets.values(), key=len, default=[])[-3:]
    return RunLosses(
        comparable=not (curve.blind or run.adversarial or curve.around_zero),
        start=_finite(curve.start),
        end=_finite(curve.end),
        held_out=_finite(median(last)) if last else None,
        broke=curve.first_bad is not None,
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
