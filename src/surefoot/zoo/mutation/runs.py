"""Run parents and mutants, diagnose each run, and record the result as one line of JSON.

The scripts run side by side in forks of one process (`surefoot.zoo.fork_server`), and so do the diagnoses, for which
this module is run as a script. Each line of the file is a `MutantRun`; a line is added as soon as its run is diagnosed.
What a file already holds, for the same text of the script and the same seed, is not run again, so an interrupted run
continues where it stopped. Files of several machines are joined by concatenation.

A line holds the diagnosis of the rules of its day. After a change of the rules, diagnose kept run folders again.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable
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
    from surefoot.diagnose.run import RecordedRun
    from surefoot.zoo.mutation import Mutant

FIRST_SEED = 100
_SOURCE = "mutant.py"
"""In the folder of a run that has ended: the text that was run."""
_RESULT = "result.json"


@dataclass(frozen=True)
class Limits:
    """How long it may take."""

    each_s: float = 180.0
    """One script. It is killed then, and its result says so."""
    all_s: float = math.inf
    """All of them. What is still running then is killed and has no result."""


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
        """The causes of the findings above `info`, best first."""
        return [finding.cause for finding in self.serious]

    @property
    def mentioned(self) -> list[str]:
        """The causes that are only mentioned (`info`), best first, of a run without a finding."""
        return [] if self.serious else [finding.cause for finding in self.findings]

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
    limits: Limits,
    keep: Path | None = None,
    done: Callable[[MutantRun], None] = lambda run: None,
    known: Iterable[MutantRun] = (),
) -> list[MutantRun]:
    """Run every mutant with the seeds it needs, unless its result is known, `jobs` at a time; the new results."""
    have = {run.key for run in known}
    wanted = deque((mutant, seed) for mutant in chosen for seed in needed(mutant, seeds))
    wanted = deque(each for each in wanted if planned(*each).key not in have)
    found: list[MutantRun] = []
    if not wanted:
        return found
    deadline = time.monotonic() + limits.all_s
    with tempfile.TemporaryDirectory(prefix="surefoot-mutants-") as scratch, ForkServer(jobs) as server:
        queue = _Queue(server, Path(scratch), keep.absolute() if keep is not None else Path(scratch, "runs"), limits)
        while wanted and queue.length < 2 * jobs:
            queue.start(*wanted.popleft())
        for ended, code in server.ended():
            result = queue.take(ended, code)
            if result is not None:
                found.append(result)
                done(result)
            if time.monotonic() > deadline:
                break  # and with the server, what is still running
            if result is not None and wanted:
                queue.start(*wanted.popleft())
    return found


def needed(mutant: Mutant, seeds: list[int]) -> list[int]:
    """The seeds to run: one is enough where nothing is compared with the parent."""
    is_compared = mutant.operator is None or mutant.operator.proof != "by construction"
    return seeds if is_compared else seeds[:1]


class _Queue:
    """Runs that are under way in a server: each script, and after its end the diagnosis of its folder."""

    def __init__(self, server: ForkServer, scratch: Path, root: Path, limits: Limits) -> None:
        self._server, self._scratch, self._root, self._limits = server, scratch, root, limits
        self._waiting: dict[str, tuple[Mutant, int, Path]] = {}
        self._count = 0

    @property
    def length(self) -> int:
        """How many are under way."""
        return len(self._waiting)

    def start(self, mutant: Mutant, seed: int) -> None:
        """Run a script."""
        place = self._scratch / str(self._count)
        place.mkdir()
        self._count += 1
        folder = folder_of(self._root, mutant, seed)
        self._waiting[str(place)] = mutant, seed, folder
        self._server.submit(_prepared(mutant, seed, folder, place, self._limits.each_s))

    def take(self, ended: ForkedRun, code: int | None) -> MutantRun | None:
        """The result of a run if it is diagnosed; else its diagnosis is started."""
        mutant, seed, folder = self._waiting[ended.place]
        result = planned(mutant, seed)
        if ended.run_folder and code is not None:
            write_file(folder / _SOURCE, mutant.text)
            self._server.submit(_diagnosis(result, folder, ended.place))
            return None
        if ended.run_folder:
            result = replace(result, trouble=f"still running after {self._limits.each_s:g} s")
        elif code == 0:
            result = _from_json(json.loads(Path(ended.place, _RESULT).read_text(encoding="utf-8")))
        else:
            result = replace(result, trouble=f"the diagnosis ended with {code}")
        del self._waiting[ended.place]
        shutil.rmtree(ended.place, ignore_errors=True)
        if folder.is_relative_to(self._scratch):
            shutil.rmtree(folder, ignore_errors=True)
        return result


def _diagnosis(run: MutantRun, folder: Path, place: str) -> ForkedRun:
    """This module as a script, for one folder."""
    output = Path(place, "diagnosis.txt")
    arguments = run.as_line(), str(folder), str(Path(place, _RESULT))
    return ForkedRun(script=__file__, arguments=arguments, place=place, output=str(output))


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
        seconds=round(description.seconds or 0.0, 2),
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


if __name__ == "__main__":
    line, folder_name, result_name = sys.argv[1:]
    write_file(Path(result_name), judged(_from_json(json.loads(line)), Path(folder_name)).as_line())
