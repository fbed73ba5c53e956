"""Compares validation with training over the run: overfitting, erratic validation, forgetting of an earlier task.

All three use the losses of evaluation passes (`diagnose/validation.py`) and so need a script that computes one of
torch's loss functions on a validation set, several times. Accuracies are not observed.
"""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from surefoot.diagnose.rule import Claim, Rule
from surefoot.diagnose.rules.data_labels import known_pairs, predictability
from surefoot.diagnose.validation import validation_curves
from surefoot.watch.operation_names import DISTANCE_LOSSES

if TYPE_CHECKING:
    from surefoot.diagnose.run import RecordedRun
    from surefoot.diagnose.validation import ValidationCurve

FEWEST_PASSES = 6
LEAST = 0.02
"""A validation loss has fallen, or risen, if it has by this share of the first training loss."""
FEWEST_AFTER = 3
"""The number of passes after the best one that must be above it."""
LOST_REMARK, LOST_WARNING = 0.03, 0.1
"""The share of the progress that must be lost again, measured by the validation loss."""
FELL = 0.8
"""Training continued if its loss is below this share of its value at the best pass."""
FEWEST_PAIRS, INFORMATIVE = 60, 4.0
"""Labels are informative if neighbouring rows predict them better than shuffled ones by so many spreads."""
FEWEST_ERRATIC = 10
ERRATIC = 0.25
"""A validation loss is erratic if it typically jumps by this share of the progress …"""
STEADY = 0.05
"""… while that of training moves by less than this share."""
FORGOTTEN = 0.25
"""A task is forgotten if its loss has returned by this share to the loss at the beginning of the new task."""


def _overfitting(run: RecordedRun) -> Claim | None:
    """The validation loss has a minimum, after which it rises steadily while the training loss continues to fall."""
    if run.nonfinite.seen or run.curve.rose:
        return None
    found = [claim for curve in validation_curves(run, FEWEST_PASSES) if (claim := _overfits(curve)) is not None]
    return max(found, key=lambda claim: claim.confidence, default=None)


def _overfits(curve: ValidationCurve) -> Claim | None:
    at, learned, rise = curve.best_at, curve.learned, curve.end - curve.best
    later = curve.smooth[at + 1 :]
    if learned <= LEAST * abs(curve.start) or at == 0 or len(later) < FEWEST_AFTER:
        return None  # a set that was never learned has another cause
    lost = rise / learned
    tail = curve.losses[-FEWEST_AFTER:]
    is_steady = rise > max(2 * curve.jump, LEAST * abs(curve.start)) and min(tail) > curve.best + 0.5 * rise
    before, now = curve.training_at(at), curve.training_end
    went_on = 0 <= now < FELL * before and now < curve.end
    if lost < LOST_REMARK or not is_steady or not went_on:
        return None
    lowest, last = min(curve.losses), curve.losses[-1]  # as the script prints them; medians are judged
    step = curve.steps[curve.losses.index(lowest)]
    share = "all that was learned" if lost >= 1 else f"{lost:.0%} of what was learned"
    return Claim(
        min(0.95, 0.75 + lost),
        f"The validation loss is lowest at step {step:,} ({lowest:.4g}) and {last:.4g} at the end, while the "
        f"training loss continued from {before:.4g} to {now:.4g}: {share} is lost again.",
        step=step,
        evidence={
            "best_step": step,
            "best_validation_loss": lowest,
            "last_validation_loss": last,
            "training_loss_then": before,
            "training_loss_at_end": now,
            "share_lost": lost,
            "passes": len(curve.losses),
            "rows": curve.rows,
        },
        severity="warning" if lost >= LOST_WARNING else "info",
        fixes=(f"Stop at step {step:,}, or keep the checkpoint with the lowest validation loss and use that one.",),
    )


def _learned_by_heart(run: RecordedRun) -> Claim | None:
    """The training loss falls far, and the validation loss was never below its beginning."""
    if run.main is None or run.nonfinite.seen or run.curve.rose or _begins_trained(run):
        return None
    pairs = known_pairs(run)
    continuous = bool(run.sampled.training_losses(*DISTANCE_LOSSES))
    known = predictability(pairs, continuous) if len(pairs) >= FEWEST_PAIRS else None
    if known is not None and known.score > INFORMATIVE:
        return None  # the labels of the training rows are right: the validation set is another one
    for curve in validation_curves(run, FEWEST_PASSES):
        first, now = curve.losses[0], run.curve.end
        never = min(curve.smooth) > (1 - LEAST) * first and curve.end >= first
        if not never or not 0 <= now < FELL * curve.start or first > 1.2 * curve.start:
            continue
        return Claim(
            0.8,
            f"The training loss fell from {curve.start:.4g} to {now:.4g}, but the validation loss of {curve.rows:,} "
            f"rows began at {first:.4g}, was never lower than {min(curve.losses):.4g}, and ends at {curve.end:.4g}: "
            "the model memorises its rows, and learns nothing that holds for others.",
            step=curve.steps[-1],
            evidence={
                "first_validation_loss": first,
                "last_validation_loss": curve.end,
                "training_loss_at_end": now,
                "passes": len(curve.losses),
                "rows": curve.rows,
            },
            severity="warning",
            fixes=(
                "Check that the labels belong to their rows: print some rows of both sets with their labels, after all "
                "shuffling and splitting.",
            ),
        )
    return None


def _erratic(run: RecordedRun) -> Claim | None:
    """The validation loss varies strongly between passes, while that of training falls smoothly."""
    if run.nonfinite.seen or run.curve.rose:
        return None
    for curve in validation_curves(run, FEWEST_ERRATIC):
        late, trained = curve.losses[2:], [value for value in curve.training[2:] if math.isfinite(value)]
        learned = curve.start - min(curve.losses)
        if learned <= 0.1 * abs(curve.start) or len(trained) < len(late) - 1:
            continue
        moves = [b - a for a, b in pairwise(late)]
        turns = sum(a * b < 0 for a, b in pairwise(moves)) / (len(moves) - 1)
        jump = median(abs(move) for move in moves) / learned
        smooth = median(abs(b - a) for a, b in pairwise(trained)) / learned
        if jump < ERRATIC or smooth > min(STEADY, 0.2 * jump) or turns < 0.4:
            continue
        return Claim(
            0.8,
            f"From one pass to the next the validation loss typically moves by {jump:.0%} of all that was learned, up "
            f"and down ({min(late):.4g} to {max(late):.4g}), the training loss by {smooth:.1%}.",
            step=curve.steps[2],
            evidence={
                "jump_share": jump,
                "training_jump_share": smooth,
                "lowest": min(late),
                "highest": max(late),
                "turns": turns,
                "passes": len(curve.losses),
                "rows": curve.rows,
            },
            severity="warning",
        )
    return None


def _forgetting(run: RecordedRun) -> Claim | None:
    """A set that the loaded model had learned before the first step, and forgets while it learns another one."""
    main = run.main
    if main is None or run.nonfinite.seen or not _begins_trained(run):
        return None
    for curve in validation_curves(run, FEWEST_PASSES - 1):
        first, rise = curve.losses[0], curve.end - curve.losses[0]
        way = curve.start - first
        is_before = curve.steps[0] == main.created_at_step
        fell = curve.training_end < 0.7 * curve.start
        if not is_before or way <= 0.3 * curve.start or not fell or min(curve.losses) < 0.9 * first:
            continue
        if rise < FORGOTTEN * way or rise < 3 * curve.jump / max(1, len(curve.losses) - 1):
            continue
        return Claim(
            min(0.95, 0.7 + 0.3 * min(1.0, rise / way)),
            f"The loss of {curve.rows:,} rows that the model knew before the first step rose from {first:.4g} to "
            f"{curve.end:.4g}, while that of the new task fell from {curve.start:.4g} to {curve.training_end:.4g}.",
            step=curve.steps[0],
            evidence={
                "loss_before": first,
                "loss_at_end": curve.end,
                "new_task_before": curve.start,
                "new_task_at_end": curve.training_end,
                "passes": len(curve.losses),
                "rows": curve.rows,
            },
            severity="warning",
        )
    return None


def _begins_trained(run: RecordedRun) -> bool:
    """Whether most of what is trained was loaded, or trained by an earlier optimizer."""
    main = run.main
    assert main is not None
    mine = [each for each in run.parameters.values() if main.number in each.optimizers]
    known = [each for each in mine if each.loaded or any(number < main.number for number in each.trained_by)]
    return len(known) > 0.5 * len(mine) > 0


RULES = (
    Rule("fit.overfitting", "curve", _overfitting),
    Rule("data.labels-uninformative", "curve", _learned_by_heart, explains=("fit.*",)),
    Rule("fit.erratic-validation", "curve", _erratic),
    Rule("fit.forgetting", "curve", _forgetting, explains=("fit.overfitting",)),
)
