"""Step 10, last part: the control with shuffled labels. Do the labels depend on the inputs at all?

Two copies learn the same rows, one with shuffled labels. Both can memorise them; only true labels should help on
held-out rows. A fault is reported only if there are enough rows, true labels are no better on held-out rows, and either
both were learnt or the true labels are as hard to learn as shuffled ones, while the nearest rows do not predict them
either.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from surefoot.diagnose.rules.data_labels import predictability
from surefoot.doctor.batches import Part, leaves, replaced, row_count, target_part, to_device
from surefoot.doctor.checks import Check, passed, skipped
from surefoot.record.facts import LabelControl

if TYPE_CHECKING:
    from surefoot.doctor.context import CheckContext

STEP = 10
_NAME = "shuffled labels"
_STEPS = 600
_RATE = 2e-3
_SHARE = 0.1
_FEWEST_ROWS = 256
_BY_HEART = 0.6
"""Training stops when the training loss has fallen by this share."""
_GAIN = 0.02
"""The share by which true labels must lower the held-out loss to count as a difference."""
_MOST_PAIRS, _MOST_FEATURES = 600, 512
"""Rows, and values of a row, that are compared with each other."""


def check_control(context: CheckContext) -> list[Check]:
    """Train with true and with shuffled labels, and compare on held-out rows."""
    found = target_part(context)
    if found is None:
        return [skipped(STEP, _NAME, "the target is not a part of the batch, so it cannot be shuffled")]
    if context.preflight.overfits is not True:
        return [skipped(STEP, _NAME, "a tiny batch is not overfitted, so the labels cannot be judged")]
    cut = max(1, len(context.batches) * 3 // 4)
    train, held = context.batches[:cut], context.batches[cut:]
    rows = sum(row_count(batch) or 0 for batch in train)
    if rows < _FEWEST_ROWS or not held:
        return [skipped(STEP, _NAME, f"{rows} rows to learn from are too few to decide; {_FEWEST_ROWS} are needed")]
    mixed = _shuffled(train, found[0])
    if mixed is None:
        return [skipped(STEP, _NAME, "targets of different batches have different shapes")]
    true_fall, true_held, steps = _learn(context, train, held)
    shuffled_fall, shuffled_held, _ = _learn(context, mixed, held)
    control = LabelControl(
        rows=rows,
        steps=steps,
        true_fall=true_fall,
        shuffled_fall=shuffled_fall,
        true_held_out=true_held,
        shuffled_held_out=shuffled_held,
        passes=steps / len(train),
        neighbour_score=_neighbour_score(train, found[0]),
    )
    context.measured(label_control=control)
    story = (
        f"after {steps} steps on {rows} rows the held-out loss is {true_held:.3g}, and {shuffled_held:.3g} with labels "
        "shuffled"
    )
    otherwise = passed(STEP, _NAME, story, control.gain, "lower with the true labels")
    if not control.gain > _GAIN:  # neither evidence that the labels are uninformative nor that they are informative
        otherwise = replace(otherwise, status="skipped", summary=f"inconclusive: {story}")
    return [context.judged(("data.labels-uninformative",), otherwise)]


def _learn(context: CheckContext, train: list[Any], held: list[Any]) -> tuple[float, float, int]:
    """How far the training loss fell, the best held-out loss, and the steps taken."""
    trial = context.trial(own_optimizer=False).without_dropout()
    trial.optimizer = torch.optim.Adam(trial.parameters, lr=_RATE)
    start, fall, best, steps = math.nan, 0.0, math.inf, 0
    epoch: list[float] = []
    for step in context.steps(_STEPS, _SHARE):
        epoch.append(trial.step(to_device(train[step % len(train)], context.device)))
        steps += 1
        if len(epoch) == len(train):
            mean, epoch = sum(epoch) / len(epoch), []
            start = mean if math.isnan(start) else start
            fall, best = (start - mean) / max(abs(start), 1e-8), min(best, _held_out(context, trial, held))
            if fall > _BY_HEART:
                break
    return fall, min(best, _held_out(context, trial, held)), steps


def _held_out(context: CheckContext, trial: Any, held: list[Any]) -> float:
    trial.model.eval()
    total = sum(float(trial.loss(to_device(batch, context.device)).detach()) for batch in held) / len(held)
    trial.model.train()
    trial.without_dropout()
    return total


def _shuffled(batches: list[Any], part: Part) -> list[Any] | None:
    """The same batches with the rows of one part shuffled over all of them."""
    targets = [part.of(batch) for batch in batches]
    if any(target is None or target.dim() == 0 for target in targets):
        return None
    rows = [target for target in targets if target is not None]
    if len({tuple(row.shape[1:]) for row in rows}) != 1:
        return None
    pool = torch.cat(rows)
    order = torch.randperm(len(pool), generator=torch.Generator().manual_seed(0))
    dealt = torch.split(pool[order], [len(row) for row in rows])
    return [replaced(batch, part, new) for batch, new in zip(batches, dealt, strict=True)]


def _neighbour_score(batches: list[Any], target: Part) -> float | None:
    """How well the nearest rows predict a label; `None` if rows are not numbers with one label each."""
    values, labels = [], []
    for batch in batches:
        parts = dict(leaves(batch))
        label = parts.pop(target.path)
        rows = [part.flatten(1) for part in parts.values() if part.is_floating_point() and part.dim() > 1]
        if (
            len(rows) != len(parts)
            or not rows
            or label.numel() != len(label)
            or any(len(r) != len(label) for r in rows)
        ):
            return None
        values.append(torch.cat(rows, 1).double())
        labels.append(label.flatten().double())
    if len({rows.shape[1] for rows in values}) != 1:
        return None
    x, y = torch.cat(values)[:_MOST_PAIRS], torch.cat(labels)[:_MOST_PAIRS]
    x = x[:, :: -(-x.shape[1] // _MOST_FEATURES)]
    if not bool(x.isfinite().all()) or not bool(y.isfinite().all()):
        return None
    is_continuous = bool((y != y.round()).any())
    found = predictability(list(zip(x.tolist(), y.tolist(), strict=True)), is_continuous)
    return None if found is None else found.score
