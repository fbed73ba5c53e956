"""The curves of validation sets, together with the training loss.

A run may evaluate several sets after each epoch. Passes belong to one set if they have the same position after their
step, use the same loss function and have the same number of rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from surefoot.core.wording import at_place

if TYPE_CHECKING:
    from surefoot.diagnose.run import RecordedRun


@dataclass(frozen=True)
class ValidationCurve:
    """The losses of one validation set, and those of the training between its passes."""

    function: str
    rows: int
    steps: list[int]
    losses: list[float]
    start: float
    """The training loss at the beginning."""
    training: list[float]
    """The median of the training losses since the previous pass; NaN if there was no step."""

    @cached_property
    def smooth(self) -> list[float]:
        """The median of each loss and its two neighbours."""
        padded = [self.losses[0], *self.losses, self.losses[-1]]
        return [median(padded[i : i + 3]) for i in range(len(self.losses))]

    @cached_property
    def best_at(self) -> int:
        """The index of the lowest smoothed pass."""
        return min(range(len(self.smooth)), key=self.smooth.__getitem__)

    @property
    def best(self) -> float:
        """The lowest level."""
        return self.smooth[self.best_at]

    @property
    def end(self) -> float:
        """The level at the end."""
        return median(self.losses[-3:])

    @property
    def learned(self) -> float:
        """How far the best pass is below the initial training loss, or below the first pass if that is higher.

        The training loss falls before the first pass, and its median at the beginning may already be below validation.
        """
        return max(self.start, self.losses[0]) - self.best

    @cached_property
    def jump(self) -> float:
        """The typical change of the loss from one pass to the next."""
        return median(abs(b - a) for a, b in pairwise(self.losses))

    def training_at(self, place: int) -> float:
        """The training level around a pass."""
        near = [value for value in self.training[max(0, place - 1) : place + 2] if math.isfinite(value)]
        return median(near) if near else math.nan

    @property
    def training_end(self) -> float:
        """The training level at the end."""
        last = [value for value in self.training[-3:] if math.isfinite(value)]
        return median(last) if last else math.nan


def validation_curves(run: RecordedRun, fewest: int) -> list[ValidationCurve]:
    """The sets with at least this many passes, all of them finite, while the main optimizer trained."""
    main = run.main
    if main is None or run.adversarial or run.curve.blind or not run.curve.finite:
        return []
    since = main.created_at_step
    series = main.series
    at = [since + own if step is None else step for own, step in zip(series.step, _run_steps(run), strict=True)]
    trained = [(step, loss) for step, loss in zip(at, series.loss, strict=False) if loss is not None]
    sets: dict[tuple[int, str, int], list[tuple[int, float]]] = {}
    for each in run.facts.evaluation_passes:
        if each.step >= since and each.loss is not None:
            sets.setdefault((each.number, each.function, each.rows), []).append((each.step, each.loss))
    sets |= _with_gradients(run)
    return [
        ValidationCurve(
            function=function,
            rows=rows,
            steps=[step for step, _ in passes],
            losses=[loss for _, loss in passes],
            start=run.curve.start,
            training=_between([step for step, _ in passes], trained),
        )
        for (_, function, rows), passes in sets.items()
        if len(passes) >= fewest and all(math.isfinite(loss) for _, loss in passes)
    ]


_FEWEST_PASSES = 3
_NEAR = 0.95
"""A validation loss above this share of the first training loss, and of the best constant answer's, never learned."""
_LEARNED = 0.5
"""The training loss must be below this share of its start."""


def doubt_about_validation(run: RecordedRun) -> str:
    """What is odd if training learned and no validation set was ever better than a constant answer; else empty."""
    chance, curves = run.curve.chance, validation_curves(run, _FEWEST_PASSES)
    ops = {loss.op for loss in run.sampled.training_losses()}
    if chance is None or chance <= 0 or not curves or not run.curve.learned:
        return ""
    for curve in curves:
        is_learned = min(curve.losses) < _NEAR * min(curve.start, chance)
        if is_learned or curve.function not in ops or not curve.training_end < _LEARNED * curve.start:
            return ""
    curve = curves[0]
    return (
        f"No fault was found, but the validation loss of {curve.rows:,} rows is {curve.losses[0]:.3g} at step "
        f"{curve.steps[0]:,} and {curve.losses[-1]:.3g} at the end, no better than that of the best constant answer "
        f"({chance:.3g}), while the training loss fell from {curve.start:.3g} to {curve.training_end:.3g}. "
        "Check that rows and labels belong together and, if a copy or an average of the weights is evaluated, that it "
        "follows them."
    )


def _with_gradients(run: RecordedRun) -> dict[tuple[int, str, int], list[tuple[int, float]]]:
    """The losses at sampled steps that no `backward` goes through, of passes without `torch.no_grad()`.

    In each of these steps the model was called for nothing else, and the loss that is trained on has another line.
    """
    found: dict[tuple[int, str, int], list[tuple[int, float]]] = {}
    for look in run.sampled.steps:
        lines = {root.sign.site for root in look.backward_calls if root.sign is not None}
        if not lines or not any(call.reached is False for call in look.model_calls if call.trained_on):
            continue
        for loss in look.calls.losses:
            if loss.trained_on and loss.site not in lines and loss.reduction == "mean" and loss.value is not None:
                found.setdefault((-1, f"{loss.op}{at_place(loss.site)}", loss.targets or 0), []).append(
                    (look.step, loss.value)
                )
    return found


def _run_steps(run: RecordedRun) -> list[int | None]:
    series = run.series
    return list(series.at) if series.at else [None] * len(series.step)


def _between(passes: list[int], trained: list[tuple[int, float]]) -> list[float]:
    """The median training loss of the steps before each pass, back to the previous pass."""
    found, place = [], 0
    for step in passes:
        mine = []
        while place < len(trained) and trained[place][0] < step:
            mine.append(trained[place][1])
            place += 1
        finite = [value for value in mine if math.isfinite(value)]
        found.append(median(finite) if finite else math.nan)
    return found
