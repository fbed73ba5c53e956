"""Which mutants are faulty, and how often the diagnosis is right about them.

A mutant is faulty if its operator is wrong by construction, or if it does harm: with three seeds or more, each of its
runs ends with a higher loss than every run of its parent, and their means differ by more than a tenth of what the
parent learned. The loss is the one of the script's own evaluations if all runs compute one, else the training loss at
the end. A seed often draws the evaluated rows, so of evaluations it is enough that each run is worse than that of the
parent with the same seed, if the training losses are apart. Where the change makes the loss smaller from the start (by
half or more), or changes its unit, each run's end is divided by its own start first. A loss that was not finite is
higher than any other. Mutants that do no harm, and the parents, must get no finding above `info`: every one of those is
counted as false, whatever it says.

Left out, and counted as such: mutants that end with an error although their operator does not mean it, and the
reverse; scripts whose loss does not measure progress, unless the operator is wrong by construction; operators that are
meant to be harmless and are not.

Shares are taken over runs. The seeds of one mutant mostly agree, so the 95 % intervals (Wilson's) count mutants, not
runs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from surefoot.zoo.mutation import Operator
    from surefoot.zoo.mutation.runs import MutantRun

FEWEST_SEEDS = 3
"""With fewer, no mutant is shown to do worse."""
_LEAST_HARM = 0.1
_BINS = (0.0, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)


@dataclass(frozen=True)
class Share:
    """A share of runs, with its 95 % interval."""

    hits: int
    runs: int
    mutants: int

    @property
    def value(self) -> float:
        """The share; 0 of no runs."""
        return self.hits / self.runs if self.runs else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's interval, with the number of mutants as the number of trials."""
        return wilson(self.value, self.mutants)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{100 * self.value:.1f} % ({100 * low:.1f} to {100 * high:.1f})" if self.runs else "-"


def wilson(share: float, trials: int) -> tuple[float, float]:
    """The 95 % interval of a share (Wilson 1927)."""
    if not trials:
        return 0.0, 1.0
    z = 1.959964
    middle = (share + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    return max(0.0, middle - half), min(1.0, middle + half)


@dataclass(frozen=True)
class JudgedMutant:
    """The runs of one mutant, and what they are counted as."""

    runs: tuple[MutantRun, ...]
    operator: Operator | None
    counts_as: str
    """`faulty`, `quiet` (nothing must be found), or `left out`."""
    reason: str = ""
    """Why it is left out."""

    @property
    def true(self) -> frozenset[str]:
        """The causes that a finding may name: those of the operator if the mutant is faulty, else none."""
        return frozenset(self.operator.causes if self.operator is not None and self.counts_as == "faulty" else ())

    def right(self, first: int) -> int:
        """Runs in which a true cause is among the first so many findings."""
        return sum(not self.true.isdisjoint(run.named[:first]) for run in self.runs)

    def mentioned(self) -> int:
        """Runs without a finding in which the first mention is a true cause."""
        return sum(not self.true.isdisjoint(run.mentioned[:1]) for run in self.runs)


def judge(runs: Iterable[MutantRun], operators: Iterable[Operator]) -> list[JudgedMutant]:
    """The runs by mutant, each mutant compared with its parent."""
    known = {operator.name: operator for operator in operators}
    by_mutant: dict[tuple[str, str, str, float | None], list[MutantRun]] = {}
    for run in runs:
        by_mutant.setdefault((run.half, run.parent, run.operator, run.strength), []).append(run)
    found = []
    for (half, parent, name, _), held in by_mutant.items():
        ordered = tuple(sorted(held, key=lambda run: run.seed))
        if not name:
            found.append(JudgedMutant(ordered, None, "quiet"))
        elif name in known:
            parents = by_mutant.get((half, parent, "", None), [])
            found.append(JudgedMutant(ordered, known[name], *_judged(ordered, parents, known[name])))
    return found


def _judged(runs: tuple[MutantRun, ...], parents: list[MutantRun], operator: Operator) -> tuple[str, str]:
    crashed = sum(run.crashed for run in runs)
    if operator.crashes:
        return ("faulty", "") if crashed == len(runs) else ("left out", "no error although one is meant")
    if crashed:
        return "left out", "ended with an error"
    if operator.proof == "by construction":
        return "faulty", ""
    if min(len(runs), len(parents)) < FEWEST_SEEDS:
        return "left out", f"fewer than {FEWEST_SEEDS} seeds"
    if not all(run.losses.comparable for run in parents) or any(run.crashed for run in parents):
        return "left out", "the loss does not measure progress"
    if not does_harm(runs, parents, operator.rescales_loss):
        return "quiet", ""
    return ("faulty", "") if operator.proof == "if harmful" else ("left out", "harmful although it is meant not to be")


def does_harm(runs: Iterable[MutantRun], parents: Iterable[MutantRun], rescaled: bool) -> bool:
    """Whether every run is worse than every run of the parent, and by a tenth of what the parent learned.

    A seed often draws the rows of an evaluation, whose losses then differ more between seeds than between a mutant and
    its parent. So evaluations are compared seed by seed where the training losses are apart.
    """
    mutants, parents = list(runs), list(parents)
    if not rescaled and _starts(mutants) < 0.5 * _starts(parents):
        return does_harm(mutants, parents, rescaled=True)
    training = _Compared(mutants, parents, evaluated=False, rescaled=rescaled)
    if rescaled or any(run.losses.held_out is None for run in (*mutants, *parents)):
        return training.are_apart and training.is_much
    held_out = _Compared(mutants, parents, evaluated=True, rescaled=False)
    by_seed = held_out.are_apart_by_seed and training.are_apart and training.is_much
    return held_out.is_much and (held_out.are_apart or by_seed)


class _Compared:
    """Where the runs of a mutant ended, and those of its parent."""

    def __init__(self, mutants: list[MutantRun], parents: list[MutantRun], evaluated: bool, rescaled: bool) -> None:
        self._ours = {run.seed: _level(run, evaluated, rescaled) for run in mutants}
        self._theirs = {run.seed: _level(run, evaluated, rescaled) for run in parents}
        self._start = mean(1.0 if rescaled else run.losses.start or 0.0 for run in parents)

    @property
    def are_apart(self) -> bool:
        """Whether every run is worse than every run of the parent."""
        return min(self._ours.values()) > max(self._theirs.values())

    @property
    def are_apart_by_seed(self) -> bool:
        """Whether every run is worse than that of the parent with the same seed."""
        both = self._ours.keys() & self._theirs.keys()
        return len(both) >= FEWEST_SEEDS and all(self._ours[seed] > self._theirs[seed] for seed in both)

    @property
    def is_much(self) -> bool:
        """Whether the means differ by a tenth of what the parent learned."""
        ours, theirs = mean(self._ours.values()), mean(self._theirs.values())
        return math.isfinite(theirs) and ours - theirs > _LEAST_HARM * max(0.0, self._start - theirs)


def _starts(runs: list[MutantRun]) -> float:
    return mean(run.losses.start or 0.0 for run in runs)


def _level(run: MutantRun, evaluated: bool, rescaled: bool) -> float:
    """Where a run ended; infinity if not at a finite loss."""
    losses = run.losses
    end = losses.held_out if evaluated else losses.end
    if end is None or losses.broke:
        return math.inf
    return end / abs(losses.start) if rescaled and losses.start else end


@dataclass(frozen=True)
class OperatorRow:
    """How often the faulty mutants of an operator, at one strength or at all, are named."""

    operator: str
    strength: float | None
    top1: Share
    top3: Share
    mentioned: Share
    quiet: int
    """Mutants that do no harm."""
    left_out: int


@dataclass(frozen=True)
class ReliabilityBin:
    """Findings of about the same confidence: how many of them are true."""

    low: float
    high: float
    findings: int
    confidence: float
    """Their mean confidence."""
    accuracy: float


@dataclass(frozen=True)
class Figures:
    """Everything that is counted."""

    top1: Share
    top3: Share
    mentioned: Share
    """Runs without a finding whose first mention is a true cause: counted as missed in `top1` and `top3`."""
    false_quiet: Share
    """Runs of mutants that do no harm, with a finding."""
    planted: int
    """Of these, the runs whose findings name the planted cause alone."""
    false_parents: Share
    operators: tuple[OperatorRow, ...]
    confusions: tuple[tuple[str, str, int], ...]
    """Most exact true cause, cause that was named first, runs."""
    left_out: tuple[tuple[str, int], ...]
    reliability: tuple[ReliabilityBin, ...]


def figures(judged: list[JudgedMutant]) -> Figures:
    """The figures of one half."""
    faulty = [held for held in judged if held.counts_as == "faulty"]
    quiet = [held for held in judged if held.counts_as == "quiet" and held.operator is not None]
    parents = [held for held in judged if held.operator is None]
    false = [(held, run) for held in quiet for run in held.runs if run.serious]
    planted = [
        run for held, run in false if held.operator and {f.cause for f in run.serious} <= {*held.operator.causes}
    ]
    confused: Counter[tuple[str, str]] = Counter()
    for held in faulty:
        truth = held.operator.causes[0] if held.operator is not None else ""
        confused.update((truth, _first(run)) for run in held.runs if held.true.isdisjoint(run.named[:1]))
    return Figures(
        _top(faulty, 1),
        _top(faulty, 3),
        _mentioned(faulty),
        Share(len(false), sum(len(held.runs) for held in quiet), len(quiet)),
        len(planted),
        Share(*_with_findings(parents), len(parents)),
        tuple(_rows(judged)),
        tuple((truth, named, count) for (truth, named), count in confused.most_common()),
        tuple(Counter(held.reason for held in judged if held.counts_as == "left out").most_common()),
        tuple(_reliability([held for held in judged if held.counts_as != "left out"])),
    )


def _top(judged: list[JudgedMutant], first: int) -> Share:
    return Share(sum(held.right(first) for held in judged), sum(len(held.runs) for held in judged), len(judged))


def _mentioned(judged: list[JudgedMutant]) -> Share:
    return Share(sum(held.mentioned() for held in judged), sum(len(held.runs) for held in judged), len(judged))


def _with_findings(judged: list[JudgedMutant]) -> tuple[int, int]:
    runs = [run for held in judged for run in held.runs]
    return sum(bool(run.serious) for run in runs), len(runs)


def _first(run: MutantRun) -> str:
    if run.trouble:
        return "(no diagnosis)"
    if run.named:
        return run.named[0]
    return f"({run.verdict}, mentions {run.mentioned[0]})" if run.mentioned else f"({run.verdict})"


def _rows(judged: list[JudgedMutant]) -> Iterable[OperatorRow]:
    """One row per operator, and below it one per strength if it has several."""
    by_operator: dict[str, list[JudgedMutant]] = {}
    for held in judged:
        if held.operator is not None:
            by_operator.setdefault(held.operator.name, []).append(held)
    for name, mine in sorted(by_operator.items()):
        yield _row(name, None, mine)
        for strength in mine[0].operator.strengths if mine[0].operator is not None else ():
            some = [held for held in mine if held.runs[0].strength == strength]
            if some:
                yield _row(name, strength, some)


def _row(name: str, strength: float | None, judged: list[JudgedMutant]) -> OperatorRow:
    faulty = [held for held in judged if held.counts_as == "faulty"]
    counts = Counter(held.counts_as for held in judged)
    shares = _top(faulty, 1), _top(faulty, 3), _mentioned(faulty)
    return OperatorRow(name, strength, *shares, counts["quiet"], counts["left out"])


def _reliability(judged: list[JudgedMutant]) -> Iterable[ReliabilityBin]:
    """Every finding above `info` of what is counted; on what must have none, each is wrong."""
    pairs = []
    for held in judged:
        pairs += [(each.confidence, each.cause in held.true) for run in held.runs for each in run.serious]
    for low, high in pairwise(_BINS):
        mine = [pair for pair in pairs if low <= pair[0] < high or pair[0] == high == _BINS[-1]]
        if mine:
            confidence, accuracy = mean(sure for sure, _ in mine), mean(right for _, right in mine)
            yield ReliabilityBin(low, high, len(mine), confidence, accuracy)
