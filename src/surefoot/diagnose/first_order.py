"""Whether the steps of a run are so small that the loss falls as its gradients alone predict.

The change of the weights times the gradient is by how much a step lowers the loss of its batch if the loss were a
straight line (`ParameterUpdate.gain`). At a usual rate the loss falls by a small part of that: it curves upwards along
the step, and much of a single batch's gradient is noise (without momentum, all of that noise is in the step too).
Where it falls by most of what is predicted, and does so to the end of the run, neither curvature nor noise limits the
steps, and several times larger ones would have reached the same loss earlier. With a step of a tenth of the stability
limit 2 / L, 0.9 of the prediction comes true.

The first part of a long training looks like that too, at a rate that is right for all of it. So this alone is worth a
mention only; beside a clipped or badly scaled run it shows that the steps are held back.
"""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import mean, median, pstdev
from typing import TYPE_CHECKING, NamedTuple

from surefoot.diagnose.curves import present

if TYPE_CHECKING:
    from surefoot.diagnose.run import RecordedRun

_FEWEST = 100
"""With fewer losses at an undiminished rate, a run is not judged: every training begins with such a fall."""
_SMALL = 5e-3
"""The change of the weights by one step, relative to their norm, up to which a step may be too small."""
_STRAIGHT = 0.5
"""The share of the predicted fall from which on neither curvature nor noise limits the steps."""
_LATE = 0.12
"""The share of the whole fall that the second half of the run must have brought."""
_CERTAIN = 4.0
"""The fall of the second half over its standard error."""


class StraightFall(NamedTuple):
    """The second half of a loss that falls as its gradients predict."""

    fall: float
    predicted: float
    """The fall that the gradients at the sampled steps predict for the same steps, to first order."""
    late: float
    """The share of the whole fall that this half brought."""

    @property
    def words(self) -> str:
        """The numbers, as a clause."""
        return (
            f"in the second half the loss fell by {self.fall:.3g}, which is {self.fall / self.predicted:.0%} of what "
            "the gradients predict for steps so small that the curvature of the loss is not felt (a tenth is usual)"
        )


def straight_fall(run: RecordedRun) -> StraightFall | None:
    """The second half of the loss at an undiminished rate, if it falls as predicted and brought much of the fall."""
    curve = run.curve
    if run.main is None or run.adversarial or run.nonfinite.seen or curve.blind or curve.continued:
        return None
    losses, gains = _losses_at_full_rate(run), _gains(run)
    count = len(losses)
    if count < _FEWEST or curve.around_zero or len(gains) < 3:
        return None
    if median(run.sampled.update_ratios() or [1.0]) > _SMALL:
        return None
    middle, width = count // 2, max(4, count // 10)
    then = [loss for _, loss in losses[middle - width // 2 : middle + width - width // 2]]
    now = [loss for _, loss in losses[-width:]]
    fall, error = mean(then) - mean(now), math.hypot(pstdev(then), pstdev(now)) / math.sqrt(width)
    if fall < max(_CERTAIN * error, _LATE * (curve.start - mean(now))) or gains[-1][0] < losses[count // 3][0]:
        return None
    predicted = sum(_at(gains, step) for step, _ in losses[middle : count - width // 2])
    if not 0 < predicted <= fall / _STRAIGHT:
        return None
    return StraightFall(fall, predicted, fall / max(fall, curve.start - mean(now)))


def _losses_at_full_rate(run: RecordedRun) -> list[tuple[int, float]]:
    """The steps of the run and their losses, until the rate falls below half of its highest value.

    While the rate still rises, as in a warm-up, there are none.
    """
    series = run.series
    top = max(run.lr, default=0.0)
    columns = zip(series.at or series.step, series.loss, series.lr, strict=False)
    rows = [(at, loss, rate) for at, loss, rate in columns if at is not None and loss is not None and rate is not None]
    last = max((place for place, (_, _, rate) in enumerate(rows) if rate >= 0.5 * top), default=-1)
    if last < 0 or rows[last // 3][2] < 0.5 * top:
        return []
    return [(at, loss) for at, loss, _ in rows[: last + 1]]


def _gains(run: RecordedRun) -> list[tuple[int, float]]:
    """The sampled steps and the fall that each predicts. What clipping took from the gradient is added again."""
    assert run.main is not None
    series = run.series
    cut = {}
    for at, norm, limit in zip(series.at or series.step, series.clip_norm, series.clip_limit, strict=False):
        if at is not None and norm and limit:
            cut[at] = max(1.0, norm / limit)
    found = []
    for look in run.sampled.steps:
        rows = [row.gain for update in look.updates if update.optimizer == run.main.number for row in update.rows]
        if known := present(rows):
            found.append((look.step, sum(known) * cut.get(look.step, 1.0)))
    return [(step, gain) for step, gain in found if math.isfinite(gain)]


def _at(points: list[tuple[int, float]], step: int) -> float:
    """The gain at a step, between the two sampled ones around it."""
    for (before, low), (after, high) in pairwise(points):
        if before <= step <= after:
            return low + (high - low) * (step - before) / max(1, after - before)
    return points[0][1] if step < points[0][0] else points[-1][1]
