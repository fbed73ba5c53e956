"""The outcome of a run, and whether a change cured the failure.

A run is judged as the diagnosis judges it (`diagnose.run.Curve`): it crashed, its loss was not finite, it diverged, it
got stuck, single batches made the loss jump, or it learned. A change cures if the baseline fails, the changed run
learns by the same criteria, and it had the chance to fail: it got at least as far as the baseline did before it failed,
measured by distance (the sum of the learning rates) or by how low the loss got. A run that is merely slower does not
count. A probe is a change that is not a fix: its outcome shows where the cause is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Literal

from surefoot.diagnose.curves import FEWEST_LOSSES, LossCurve
from surefoot.diagnose.run import RecordedRun
from surefoot.record.facts import NonFiniteLossEvent, RunDescription, RunFacts

Outcome = Literal[
    "learned", "slow", "stuck", "diverged", "non-finite", "crashed", "spiked", "too short", "calm", "risen"
]
"""The last two are outcomes of a short run after an incident: see `after_incident`."""

_NOT_NUMERIC = ("ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError", "NameError", "AttributeError",
                "KeyError", "TypeError", "FileNotFoundError", "PermissionError", "OSError", "OutOfMemoryError",
                "KeyboardInterrupt", "MemoryError")  # fmt: skip
"""Errors that no change to the training can cure."""
_MOST_SKIPPED = 0.75
"""A run that skipped more than this share of its steps does not count as cured by skipping."""
_FAR = 20.0
"""A loss this many times above its neighbours is attributed to its batch."""
_FEWEST = FEWEST_LOSSES
"""Fewer losses than this cannot be judged."""


@dataclass(frozen=True)
class RunReading:
    """The outcome of one run."""

    outcome: Outcome
    steps: int
    failed_at: int | None = None
    """The first step that failed, if any."""
    start: float = math.nan
    end: float = math.nan
    """The final loss."""
    noise: float = 0.0
    suspected_at: int | None = None
    """The step that the first finding of the diagnosis names."""
    bad_steps: tuple[int, ...] = ()
    """Steps whose batch made the loss jump or non-finite, and the step before each of them."""
    sum_of_rates: float = 0.0
    """The sum of the learning rates up to the failure, or to the end."""
    left_out: int = 0
    """Steps that were skipped on purpose."""
    words: str = ""
    """The outcome in words, for the table."""
    losses: list[tuple[int, float]] = field(default_factory=list)
    crash: str = ""

    @property
    def fails(self) -> bool:
        """Whether there is a failure to cure."""
        return self.outcome not in ("learned", "too short", "calm")


def read(facts: RunFacts, description: RunDescription, verdict: str = "broken") -> RunReading:
    """Judge a run by its facts. `verdict` is its diagnosis, or for a changed run that of the baseline."""
    skipped = set(facts.experiment.skipped or ()) if facts.experiment is not None else set()
    run = RecordedRun(_without(facts, skipped) if skipped else facts, description)
    curve = run.curve
    bad = _first_bad(run, curve, forgiving=bool(skipped))
    crash = crash_of(facts, description)
    thrown = _worst(curve)
    outcome, failed_at, text = _outcome(run, curve, bad, crash, verdict, thrown)
    every = len(skipped) + len(curve.values)
    if skipped:
        text = f"{text}, {len(skipped)} of {every} steps skipped"
        many = len(skipped) > _MOST_SKIPPED * every
        outcome = "stuck" if many and outcome in ("learned", "too short") else outcome
    return RunReading(
        outcome,
        steps=max(run.steps, facts.backwards if run.main is None else 0),
        failed_at=failed_at,
        start=curve.start,
        end=curve.end,
        noise=curve.noise,
        bad_steps=_bad_steps(run, bad, thrown),
        sum_of_rates=_sum_of_rates(run, failed_at),
        left_out=len(skipped),
        words=text,
        losses=list(zip(curve.steps, curve.values, strict=True)),
        crash=crash,
    )


def _without(facts: RunFacts, skipped: set[int]) -> RunFacts:
    """The facts of a run without the skipped steps."""
    return replace(facts, optimizers=[replace(held, series=held.series.without(skipped)) for held in facts.optimizers])


def _first_bad(run: RecordedRun, curve: LossCurve, forgiving: bool) -> int | None:
    """The first step at which a loss or a gradient was not finite."""
    if forgiving:
        return curve.first_bad
    steps = [event.step for event in run.events(NonFiniteLossEvent)]
    steps += [event.step for event in run.nonfinite.gradients]
    if curve.first_bad is not None:
        steps.append(curve.first_bad)
    if not steps and run.nonfinite.seen:
        steps.append(run.steps)
    return min(steps, default=None)


def crash_of(facts: RunFacts, description: RunDescription) -> str:
    """The error that ended the run; empty if it ended normally or was stopped."""
    if facts.experiment is not None and facts.experiment.ended:
        return ""
    crash = facts.crash
    if crash is not None:
        message = crash.message.strip().splitlines()
        return f"{crash.type}: {message[0][:120] if message else ''}".rstrip(": ")
    code = description.exit_code
    return f"exit code {code}" if code else ""


def is_numeric(crash: str) -> bool:
    """Whether an error may be caused by numbers or data, and not by code or files."""
    return not crash.startswith(_NOT_NUMERIC) and "out of memory" not in crash


def _outcome(
    run: RecordedRun, curve: LossCurve, bad: int | None, crash: str, verdict: str, thrown: list[int]
) -> tuple[Outcome, int | None, str]:
    if bad is not None and not (verdict == "healthy" and curve.learned):
        return "non-finite", bad, f"not finite from step {bad}"
    if crash:
        return "crashed", run.steps, crash
    if curve.count < _FEWEST:
        return "too short", None, f"only {curve.count} losses"
    if curve.rose:
        onset = _onset(curve)
        return "diverged", onset, f"rose from step {onset}" if onset is not None else "rose"
    if curve.learned or curve.fell_through_noise:
        if thrown and verdict != "healthy":
            more = f" and {len(thrown) - 1} more" if len(thrown) > 1 else ""
            return "spiked", thrown[0], f"spiked at step {thrown[0]}{more}"
        return "learned", None, f"fell to {curve.end:.3g}"
    if verdict == "healthy":
        return "learned", None, f"ended at {curve.end:.3g}"
    onset = _onset(curve) if curve.blew_up else None
    if curve.chance is not None and curve.end > 0.97 * curve.chance:
        return "stuck", onset, f"at chance ({curve.end:.3g})"
    return "stuck", onset, f"stuck at {curve.end:.3g}"


def _onset(curve: LossCurve) -> int | None:
    """The first step from which three consecutive losses are far above the first one."""
    limit = curve.start + max(0.5 * abs(curve.start), 1e-12)
    for i in range(len(curve.values) - 2):
        if all(not value < limit for value in curve.values[i : i + 3]):
            return curve.steps[i]
    return None


def _worst(curve: LossCurve) -> list[int]:
    """The steps whose loss rose furthest above the first loss. Later ones are often only a consequence."""
    far: dict[int, float] = {}
    for i, (step, value) in enumerate(zip(curve.steps, curve.values, strict=True)):
        before = [v for v in curve.values[max(0, i - 20) : i] if math.isfinite(v)]
        if len(before) >= 3 and math.isfinite(value) and value > max(_FAR * abs(median(before)), abs(curve.start)):
            far[step] = value
    largest = max(far.values(), default=0.0)
    return [step for step, value in far.items() if value > 0.02 * largest]


def _bad_steps(run: RecordedRun, bad: int | None, thrown: list[int]) -> tuple[int, ...]:
    """Steps whose batch is suspected; none if there are very many."""
    steps = set(thrown) if len(thrown) <= max(3, run.steps // 5) else set()
    if bad is not None:
        steps |= {bad, max(0, bad - 1)}
    return tuple(sorted(steps))


def _sum_of_rates(run: RecordedRun, until: int | None) -> float:
    rates = [value or 0.0 for value in run.series.lr] if run.main is not None else []
    return math.fsum(rates if until is None else rates[:until])


Result = Literal["cures", "does not", "cannot tell"]


def compare(baseline: RunReading, changed: RunReading) -> tuple[Result, str]:
    """Whether a change cured the run, and the reason."""
    if changed.outcome == "too short":
        return "cannot tell", changed.words
    if changed.fails and not _learns_with_a_spike(baseline, changed):
        return "does not", changed.words
    if not _came_as_far(baseline, changed):
        share = changed.sum_of_rates / baseline.sum_of_rates if baseline.sum_of_rates else 0.0
        return "cannot tell", f"reached only {share:.0%} of the baseline's distance (sum of learning rates)"
    low = baseline.outcome in ("stuck", "diverged", "slow") and math.isfinite(baseline.end)
    if low and baseline.end - changed.end <= _clearly(baseline, changed):
        return "does not", f"ends at {changed.end:.3g}, which is not clearly lower"
    return "cures", f"ends at {changed.end:.3g}, {changed.words}" if changed.fails else changed.words


def _learns_with_a_spike(baseline: RunReading, changed: RunReading) -> bool:
    """Whether a single loss of a changed run jumps, and it learns what the baseline never learned."""
    is_other = baseline.outcome in ("stuck", "diverged") and math.isfinite(baseline.end)
    return is_other and changed.outcome == "spiked" and changed.end < (1 - LEARNED) * baseline.end


def _clearly(baseline: RunReading, changed: RunReading) -> float:
    """By how much the final loss must be lower: a tenth of the loss, or a quarter of its fall."""
    part = 0.1 * abs(baseline.end)
    if baseline.outcome == "slow":
        part = 0.25 * min(abs(baseline.end), abs(baseline.start - baseline.end))
    return max(part, 2 * min(baseline.noise, changed.noise))


def _came_as_far(baseline: RunReading, changed: RunReading) -> bool:
    """Whether the changed run had the chance to fail where the baseline did."""
    if baseline.failed_at is None:
        return changed.steps >= 0.9 * baseline.steps
    if changed.steps < baseline.failed_at:
        return False
    before = [value for step, value in baseline.losses if step < baseline.failed_at and math.isfinite(value)]
    if not before or changed.sum_of_rates >= 0.95 * baseline.sum_of_rates:
        return True
    lowest = min(median(before[i : i + 5]) for i in range(max(1, len(before) - 4)))
    return changed.end < lowest - max(0.1 * abs(lowest), 2 * changed.noise)


LEARNED = 0.5
"""If a few rows are repeated, a working model memorizes them: the loss must fall by at least this share."""
FAR_ABOVE = 100.0
"""A loss that is always this many times above the loss on noise shows that nothing was learned, however far it fell."""


def not_learned(few: RunReading, noise: RunReading) -> str | None:
    """Why a few rows were not learned although their loss fell; `None` if they may have been learned.

    A loss that begins at 1e10 falls a long way before anything is learned. The loss on noise, with the same targets, is
    what a model can reach without using the inputs.
    """
    if noise.outcome != "learned" or not few.end > FAR_ABOVE * max(abs(noise.start), abs(noise.end)):
        return None
    return f"a few rows are not learned: their loss ends at {few.end:.3g}, far above {noise.end:.3g} on noise"


def probe_text(name: str, baseline: RunReading, changed: RunReading) -> str:
    """The text of a probe in the table."""
    if changed.outcome == "too short":
        return changed.words
    if name == "other-seed":
        return (
            "also fails with another seed" if changed.fails else "does not fail with another seed: it depends on chance"
        )
    if name == "tiny-batch":
        if changed.fails:
            return "not even a few rows are learned: check the model, the loss and the update"
        way = f"from {changed.start:.3g} to {changed.end:.3g}"
        if changed.start - changed.end < LEARNED * abs(changed.start):
            return f"a few rows are hardly learned: their loss only falls {way}"
        return f"a few rows are learned ({way}): model and loop work, check the data and its scale"
    if name == "synthetic-inputs":
        same = changed.outcome in ("non-finite", "diverged", "crashed", "spiked")
        if same:
            return "also fails on noise: the values of the inputs are not the cause"
        so = "learns" if changed.outcome == "learned" else "does not fail"
        return f"{so} with inputs of mean 0 and deviation 1: it fails only on its own inputs"
    if baseline.outcome in ("stuck", "slow"):
        near = math.isfinite(changed.end) and changed.end <= baseline.end + max(
            0.05 * abs(baseline.end), 2 * baseline.noise
        )
        return "no worse with shuffled labels: nothing is learned from them" if near else "worse: the labels matter"
    if changed.outcome in ("non-finite", "diverged", "crashed", "spiked"):
        return "also fails with shuffled labels"
    return "does not fail with shuffled labels"
