"""What became of the steps after an incident: a short run, compared with the steps before the incident.

A run of `surefoot replay --experiments` is the captured step, k = 0, and some twenty more. It fails if

- a loss or a gradient is not finite, at the step itself or after it. A step that a loss scaler leaves out later on is
  its ordinary business, unless it leaves out more than half of them;
- or the script ends with an error about numbers;
- or the loss rises and stays up: the median of the second half of the run lies above the bar of the record.

The bar is the rule that `Setback` has for a model that was damaged, with the record's history in the place of the
window: above every loss, and more than `SPREADS` robust deviations (interquartile range / 1.349) and `RISE` of its
size above the median. The history is the `WINDOW_STEPS` losses in a row with the lowest median of the 50 steps that an
incident keeps, the latest if several have it: of a loss that falls those are the last ones, and of a run that was set
back long before its recovery those before the setback. A median of ten that is above the highest of twenty is no
noise, whatever the distribution. Fewer than `FEWEST_BEFORE` losses give no bar, and without one nothing is said about a
run that is finite, except for one that ends at `TENFOLD` its first loss.

A high loss or gradient at k = 0 alone is no failure: that is what a hard batch looks like, and the question is what its
update does. Gradient norms later on are not judged: they may grow while the loss is as good as ever.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median, quantiles
from typing import TYPE_CHECKING

from surefoot.experiments.run_comparison import RunReading, crash_of, is_numeric
from surefoot.record.facts import ExperimentFacts
from surefoot.record.incidents.reading import number

if TYPE_CHECKING:
    from surefoot.experiments.run_comparison import Result
    from surefoot.record.facts import ContinuedStep, RunDescription, RunFacts
    from surefoot.record.incidents.summary import IncidentFacts

FOLLOW_STEPS = 20
WINDOW_STEPS = 20
FEWEST_BEFORE = 8
FEWEST_AFTER = 4
"""Steps after the captured one without which nothing is said about their level."""
SPREADS = 3.0
RISE = 0.1
TENFOLD = 10.0
_IQR_OF_NORMAL = 1.349
_MOST_SKIPPED = 0.75
"""A run that left out more of its steps than this was not cured by leaving them out."""


@dataclass(frozen=True)
class Level:
    """The level of the loss before the step."""

    middle: float
    bar: float
    """A loss that stays above it has risen."""


def losses_before(facts: IncidentFacts) -> list[tuple[int, float]]:
    """The applied steps before the captured one, with their losses."""
    rows = [row for row in facts.get("signals", []) if isinstance(row, dict) and not row.get("skipped")]
    found = [(int(row["step"]), number(row.get("loss"))) for row in rows if isinstance(row.get("step"), int)]
    return [(step, loss) for step, loss in found if step < facts["step"] and math.isfinite(loss)]


def level_before(losses: list[float]) -> Level | None:
    """The level of the loss before the step; `None` if too few steps are known."""
    if len(losses) < FEWEST_BEFORE:
        return None
    size = min(WINDOW_STEPS, len(losses))
    windows = [losses[i : i + size] for i in range(len(losses) - size + 1)]
    window = min(reversed(windows), key=median)
    middle = median(window)
    low, _, high = quantiles(window, n=4, method="inclusive")
    bar = max(max(window), middle + SPREADS * (high - low) / _IQR_OF_NORMAL, middle + RISE * abs(middle))
    return Level(middle, bar)


def recorded_by(facts: RunFacts) -> ExperimentFacts:
    """What an experiment on an incident recorded in its own process."""
    return facts.experiment or ExperimentFacts()


def read_after_incident(facts: RunFacts, description: RunDescription, step: int, level: Level | None) -> RunReading:
    """What became of one run."""
    recorded = recorded_by(facts)
    rows = recorded.trail or []
    losses = [(step + k, number(row.loss)) for k, row in enumerate(rows)]
    kept = [k for k, row in enumerate(rows) if not row.skipped]
    after = [losses[k][1] for k in kept if k > 0]
    tail = after[len(after) // 2 :]
    end = median(tail) if tail and all(map(math.isfinite, tail)) else math.nan
    outcome, k, words, crash = "calm", None, "", crash_of(facts, description)
    bad = _first_bad(rows, recorded.open or [])
    if bad is not None:
        outcome, k, words = "non-finite", bad, _when(bad, rows)
    elif crash:
        outcome, k, words = "crashed", len(rows), crash
    elif not rows:
        outcome, words = "too short", "the captured step was not reached"
    elif len(kept) < (1 - _MOST_SKIPPED) * len(rows):
        outcome, k, words = "non-finite", 0, f"{len(rows) - len(kept)} of {len(rows)} steps had to be skipped"
    elif len(after) >= FEWEST_AFTER and (bar := _bar(level, losses, kept)) is not None and end > bar:
        k = next((k for k in kept if k > 0 and losses[k][1] > bar), len(rows) - 1)
        outcome, words = "risen", f"rises to {end:.3g} and stays there{_before(level)}"
    elif len(after) >= FEWEST_AFTER:
        words = f"goes on at {end:.3g}{_before(level)}"
    else:
        words = f"finite, and over after {len(rows)} steps"
    left_out = len(rows) - len(kept)
    if left_out and outcome != "non-finite":
        words += f", {left_out} of {len(rows)} steps skipped"
    return RunReading(
        outcome,  # type: ignore[arg-type]
        left_out=left_out,
        steps=len(rows),
        failed_at=None if k is None else step + k,
        start=losses[0][1] if losses else math.nan,
        end=end,
        sum_of_rates=math.fsum(row.lr for row in rows[:k] if row.lr is not None and row.applied),
        words=words,
        losses=losses,
        crash=crash,
    )


def _bar(level: Level | None, losses: list[tuple[int, float]], kept: list[int]) -> float | None:
    if level is not None:
        return level.bar
    first = losses[kept[0]][1]
    return TENFOLD * first if first > 0 else None


def _before(level: Level | None) -> str:
    return "" if level is None else f" (before: {level.middle:.3g})"


def _first_bad(rows: list[ContinuedStep], under_way: list[float]) -> int | None:
    """The first step that failed by a value that is not finite."""
    for k, row in enumerate(rows):
        if not row.skipped and _is_bad(row, k):
            return k
    if not all(map(math.isfinite, under_way)):  # and there it died
        return len(rows)
    later = [row for row in rows[1:] if not row.skipped]
    left_out = [k for k, row in enumerate(rows) if k > 0 and not row.applied and not row.skipped]
    return left_out[0] if len(later) >= FEWEST_AFTER and len(left_out) > len(later) / 2 else None


def _is_bad(row: ContinuedStep, k: int) -> bool:
    if not math.isfinite(number(row.loss)):
        return True
    gradient = row.grad_norm is None or math.isfinite(row.grad_norm)
    return not gradient if row.applied else k == 0


def _when(k: int, rows: list[ContinuedStep]) -> str:
    what = "the loss is" if k >= len(rows) or not math.isfinite(number(rows[k].loss)) else "gradients are"
    words = (
        f"{what} not finite {'at the step itself' if k == 0 else f'{k} steps after it' if k > 1 else 'right after it'}"
    )
    if k == 0 and rows and not rows[0].applied:
        words += ", which the loss scaler leaves out"
    return words


def compare_after_incident(baseline: RunReading, changed: RunReading) -> tuple[Result, str]:
    """Whether a change cured it: no failure over the steps, and the sum of rates, that the baseline took to fail."""
    if changed.outcome == "too short":
        return "cannot tell", changed.words
    if changed.outcome == "crashed" and not is_numeric(changed.crash):
        return "cannot tell", changed.words
    if changed.fails:
        return "does not", changed.words
    assert baseline.failed_at is not None
    needed = baseline.failed_at - baseline.losses[0][0] + 1 if baseline.losses else 1
    if changed.steps < needed:
        return "cannot tell", f"over after {changed.steps} steps, and the failure took {needed}"
    if changed.sum_of_rates < 0.95 * baseline.sum_of_rates:
        share = changed.sum_of_rates / baseline.sum_of_rates
        return "cannot tell", f"has not come as far yet ({share:.0%} of the distance)"
    return "cures", changed.words
