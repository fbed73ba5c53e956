"""The outcome of the steps after an incident, compared with the steps before it.

A run of `surefoot replay --experiments` consists of the captured step, k = 0, and about twenty more. It fails if

- a loss or a gradient is not finite, at the captured step or later. Later steps that a loss scaler skips are normal,
  unless it skips more than half of them;
- or the script ends with a numerical error;
- or the loss rises and stays high: the median of the second half of the run is above the limit (`Level.bar`).

The limit is the rule that `Setback` applies to a damaged model, with the recorded history as its window: above every
loss, and above the median by more than `SPREADS` robust deviations (interquartile range / 1.349) and by more than
`RISE` of its size. Of the 50 steps that an incident stores, the history is the `WINDOW_STEPS` consecutive losses with
the lowest median, the latest such window if there are several. If the loss was falling, these are the last losses. If
the run was set back long before, they are the losses before the setback. A median of ten losses above the highest of
twenty is not noise, whatever the distribution. With fewer than `FEWEST_BEFORE` losses there is no limit, and a finite
run is then judged only by whether it ends at `TENFOLD` its first loss.

A high loss or gradient at k = 0 alone is not a failure: a hard batch looks like that, and the question is what its
update does. Later gradient norms are not judged, because they may grow while the loss stays low.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median, quantiles
from typing import TYPE_CHECKING

from surefoot.experiments.run_comparison import Result, RunReading, crash_of, is_numeric
from surefoot.record.facts import ContinuedStep, ExperimentFacts, RunDescription, RunFacts
from surefoot.record.incidents.reading import number

if TYPE_CHECKING:
    from surefoot.record.incidents.summary import IncidentFacts

FOLLOW_STEPS = 20
WINDOW_STEPS = 20
FEWEST_BEFORE = 8
FEWEST_AFTER = 4
"""Fewer steps than this after the captured one are not enough to judge the level of the loss."""
SPREADS = 3.0
RISE = 0.1
TENFOLD = 10.0
_IQR_OF_NORMAL = 1.349
_MOST_SKIPPED = 0.75
"""A run that skipped more than this share of its steps does not count as cured by skipping."""


@dataclass(frozen=True)
class Level:
    """The level of the loss before the step."""

    middle: float
    bar: float
    """A loss that stays above this limit has risen."""


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
    """The facts that an experiment on an incident recorded in its own process."""
    return facts.experiment or ExperimentFacts()


def read_after_incident(facts: RunFacts, description: RunDescription, step: int, level: Level | None) -> RunReading:
    """The outcome of one run."""
    recorded = recorded_by(facts)
    rows = recorded.trail or []
    losses = [(step + k, number(row.loss)) for k, row in enumerate(rows)]
    kept = [k for k, row in enumerate(rows) if not row.skipped]
    after = [losses[k][1] for k in kept if k > 0]
    tail = after[len(after) // 2 :]
    end = median(tail) if tail and all(map(math.isfinite, tail)) else math.nan
    outcome, k, text, crash = "calm", None, "", crash_of(facts, description)
    bad = _first_bad(rows, recorded.open or [])
    if bad is not None:
        outcome, k, text = "non-finite", bad, _when(bad, rows)
    elif crash:
        outcome, k, text = "crashed", len(rows), crash
    elif not rows:
        outcome, text = "too short", "the captured step was not reached"
    elif len(kept) < (1 - _MOST_SKIPPED) * len(rows):
        outcome, k, text = "non-finite", 0, f"{len(rows) - len(kept)} of {len(rows)} steps were skipped"
    elif len(after) >= FEWEST_AFTER and (bar := _bar(level, losses, kept)) is not None and end > bar:
        k = next((k for k in kept if k > 0 and losses[k][1] > bar), len(rows) - 1)
        outcome, text = "risen", f"rises to {end:.3g} and stays there{_before(level)}"
    elif len(after) >= FEWEST_AFTER:
        text = f"stays at {end:.3g}{_before(level)}"
    else:
        text = f"finite, but the run ended after {len(rows)} steps"
    left_out = len(rows) - len(kept)
    if left_out and outcome != "non-finite":
        text += f", {left_out} of {len(rows)} steps skipped"
    return RunReading(
        outcome,  # type: ignore[arg-type]
        left_out=left_out,
        steps=len(rows),
        failed_at=None if k is None else step + k,
        start=losses[0][1] if losses else math.nan,
        end=end,
        sum_of_rates=math.fsum(row.lr for row in rows[:k] if row.lr is not None and row.applied),
        words=text,
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
    """The first step with a non-finite value."""
    for k, row in enumerate(rows):
        if not row.skipped and _is_bad(row, k):
            return k
    if not all(map(math.isfinite, under_way)):  # the run ended in this step
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
    text = (
        f"{what} not finite {'at the step itself' if k == 0 else f'{k} steps after it' if k > 1 else 'right after it'}"
    )
    if k == 0 and rows and not rows[0].applied:
        text += ", and the loss scaler skips the step"
    return text


def compare_after_incident(baseline: RunReading, changed: RunReading) -> tuple[Result, str]:
    """Whether a change cured the failure over the steps and the sum of rates that the baseline took to fail."""
    if changed.outcome == "too short":
        return "cannot tell", changed.words
    if changed.outcome == "crashed" and not is_numeric(changed.crash):
        return "cannot tell", changed.words
    if changed.fails:
        return "does not", changed.words
    assert baseline.failed_at is not None
    needed = baseline.failed_at - baseline.losses[0][0] + 1 if baseline.losses else 1
    if changed.steps < needed:
        return "cannot tell", f"ended after {changed.steps} steps; the baseline failed after {needed}"
    if changed.sum_of_rates < 0.95 * baseline.sum_of_rates:
        share = changed.sum_of_rates / baseline.sum_of_rates
        return "cannot tell", f"reached only {share:.0%} of the baseline's distance (sum of learning rates)"
    return "cures", changed.words
