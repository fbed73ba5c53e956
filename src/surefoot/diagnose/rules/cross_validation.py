"""A cross-validation that continues to train one model: it has seen the rows of every fold after the first.

The rows that are held out change places with trained ones. That is a leak only if the weights are kept from one fold to
the next, which parameters and losses show: a new model, and one that is reset, begin again.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from surefoot.core.wording import at_place
from surefoot.diagnose.data_summary import where_of
from surefoot.diagnose.rule import Claim, Rule

if TYPE_CHECKING:
    from surefoot.diagnose.run import RecordedRun
    from surefoot.record.facts import ModelCall

_FEW, _MOST = 0.02, 0.97
"""The shares of rows up to which none, and from which on all, were trained on; some rows occur twice in a data set."""
_FEWEST_ROWS = 16
_NEAR = 5
"""The number of losses that make a level."""


@dataclass(frozen=True)
class _Fold:
    """Consecutive evaluations of the same rows."""

    rows: set[int]
    begin: int
    end: int
    call: ModelCall


def continued_folds(run: RecordedRun) -> Claim | None:
    """Rows are held out at first and trained on later, while trained ones are held out in their place."""
    if run.facts.preflight is not None or run.adversarial or run.trials or not run.steps:
        return None
    first = {
        row: at for seen in run.facts.step_data.rows.values() for row, at in zip(seen.prints, seen.first, strict=True)
    }
    rate = run.facts.backwards / run.steps
    for before, fold in pairwise(_folds(run)):
        known = [first[row] < fold.begin * rate for row in fold.rows if row in first]
        later = [first[row] >= before.end * rate for row in before.rows if row in first]
        seen, held = sum(known) / len(fold.rows), sum(later) / len(before.rows)
        if seen < _MOST or held < _MOST or not _is_held_out(run, before, fold) or not _continues(run, before, fold):
            continue
        return Claim(
            0.9,
            f"`{fold.call.model}` is evaluated on {len(fold.rows):,} rows{at_place(fold.call.site)} at step "
            f"{fold.begin:,}, and was trained on {seen:.0%} of them before; those that were evaluated until step "
            f"{before.end:,} are trained on now. The folds change, and the weights are kept.",
            step=fold.begin,
            where=where_of(fold.call.site, fold.call.model),
            evidence={"evaluated": len(fold.rows), "trained_before": seen, "fold_began_at": fold.begin},
            fixes=("Create the model and its optimizer anew for every fold, inside the loop over the folds.",),
        )
    return None


def _folds(run: RecordedRun) -> list[_Fold]:
    """The evaluations of the trained models, in their order; one begins a new fold if it has other rows."""
    blocks: dict[tuple[int, int | None], list[ModelCall]] = {}
    for call in run.facts.evaluations:
        if call.rows and not call.grad_mode and call.step > 0:
            blocks.setdefault((call.step, call.block), []).append(call)
    found: list[_Fold] = []
    for (step, _), calls in sorted(blocks.items(), key=lambda item: item[0][0]):
        rows = {row for call in calls for row in call.rows or []}
        if len(rows) < _FEWEST_ROWS:
            continue
        if found and len(rows & found[-1].rows) > 0.5 * len(rows):
            last = found.pop()
            found.append(_Fold(last.rows | rows, last.begin, step, last.call))
        elif not found or not rows & found[-1].rows:
            found.append(_Fold(rows, step, step, calls[0]))
        else:
            return []  # neither the same rows nor others: no folds
    return found


def _is_held_out(run: RecordedRun, before: _Fold, fold: _Fold) -> bool:
    """Whether no rows of a fold are trained on any more once those of the one before it are."""
    calls = [set(call.rows or []) for call in run.sampled.trained_model_calls if before.end <= call.step < fold.end]
    begun = next((place for place, rows in enumerate(calls) if rows & before.rows), len(calls))
    trained = [row for rows in calls[begun:] for row in rows]
    return len(trained) >= _FEWEST_ROWS and sum(row in fold.rows for row in trained) <= _FEW * len(trained)


def _continues(run: RecordedRun, before: _Fold, fold: _Fold) -> bool:
    """Whether the same parameters are trained in both, and the loss does not begin again."""
    early, late = set[int](), set[int]()
    for look in run.sampled.steps:
        held = early if look.step < before.end else late if look.step >= fold.begin else set[int]()
        held |= {row.parameter for update in look.updates for row in update.rows}
    losses = sorted(
        (at, loss)
        for held in run.optimizers
        for at, loss in zip(held.series.at, held.series.loss, strict=False)
        if at is not None and loss is not None
    )
    start = [loss for _, loss in losses[:_NEAR]]
    end = [loss for at, loss in losses if at < before.end][-_NEAR:]
    switch = [loss for at, loss in losses if before.end <= at < fold.begin]
    if not early or early != late or not start or not end or not switch:
        return False
    half = 0.5 * (median(start) + median(end))
    return median(end) < half and max(median(switch[i : i + _NEAR]) for i in range(len(switch))) < half


RULES = (Rule("data.leakage", "value", continued_folds),)
