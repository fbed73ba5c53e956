"""Whether the steps of a run are so small that the slope of the loss stays the same along their path.

The gradients at both ends of a path, each times the whole path, are the slopes of the loss along it (`PathSlopes`). The
two gradients come from different batches, so that noise does not pass for a slope. At a usual rate, little of the slope
is left at the end of a path: the loss curves upwards, or the path is mostly noise. Where most of it is left up to the
end of the run, neither curvature nor noise limits the steps, and several times larger ones would have led further down
in the same direction.

The first part of a long training looks like that too, at a rate that is right for all of it. So two more numbers
belong to it: how far the weights moved in the whole run, relative to their norm, and how much of the loss is left.
"""

from __future__ import annotations

import math
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from surefoot.diagnose.run import RecordedRun

_FEWEST = 100
"""With fewer losses, a run is not judged: every training begins with such a path."""
_SMALL = 5e-3
"""The change of the weights by one step, relative to their norm, up to which a step may be too small."""
STRAIGHT = 0.6
"""The share of the slope that is left at the end, from which on neither curvature nor noise limits the steps."""
_COVERED = 0.2
"""The share of the steps that the paths must cover."""
_SHORTEST = 3
"""Shorter paths are dominated by the gradient of the batch that they begin with."""


class StraightPath(NamedTuple):
    """The later paths of a run whose steps are small and lead straight down."""

    slope_kept: float
    """The share of the slope that is left at the end of the paths."""
    moved: float
    """The size of all steps together, relative to the weights."""
    loss_left: float
    """The loss at the end, as a share of what there was to learn."""

    @property
    def is_held_back(self) -> bool:
        """Whether the run also ended with much left to learn, near the weights that it began with."""
        return self.moved <= 0.3 and self.loss_left >= 0.4

    @property
    def words(self) -> str:
        """The numbers, as a clause."""
        return (
            f"{min(1.0, self.slope_kept):.0%} of the slope of the loss is left after many steps in the same direction "
            "(a third is usual), so that larger steps would have led further down"
        )


def straight_path(run: RecordedRun) -> StraightPath | None:
    """The later paths of the run, if they lead straight down in small steps."""
    curve, kept = run.curve, slope_kept(run)
    typical = median(run.update_ratios() or [math.inf])
    if kept is None or kept < STRAIGHT or curve.count < _FEWEST or typical > _SMALL:
        return None
    return StraightPath(kept, typical * curve.count, curve.left)


def slope_kept(run: RecordedRun) -> float | None:
    """The share of the slope that is left at the end of the later paths; negative if they end uphill.

    `None` if that is not known, or if the loss does not show progress.
    """
    curve = run.curve
    if run.main is None or run.adversarial or run.nonfinite.seen or curve.blind or curve.continued:
        return None
    paths, steps = _paths(run)
    start, end = sum(path.start for path in paths), sum(path.end for path in paths)
    if curve.around_zero or sum(path.steps for path in paths) < _COVERED * steps or start >= 0:
        return None
    return end / start


class _Path(NamedTuple):
    steps: int
    start: float
    end: float


def _paths(run: RecordedRun) -> tuple[list[_Path], int]:
    """The paths at half of the highest rate or more, without those of the first quarter of such steps; their number.

    What clipping took from the gradients is added again. While the rate still rises, as in a warm-up, there are none.
    """
    assert run.main is not None
    series = run.series
    numbers = series.at or series.step
    half = 0.5 * max(run.lr, default=0.0)
    full = {at for at, rate in zip(numbers, series.lr, strict=False) if at is not None and (rate or 0.0) >= half}
    clipped = zip(numbers, series.clip_norm, series.clip_limit, strict=False)
    cut = {at: max(1.0, norm / limit) for at, norm, limit in clipped if norm and limit}
    last = max(full, default=0)
    found = []
    for look in run.sampled.steps:
        for path in [update.path for update in look.updates if update.optimizer == run.main.number]:
            if path is None or look.step < 0.25 * last or look.step - path.since < _SHORTEST:
                continue
            slopes = path.start * cut.get(path.since, 1.0), path.end * cut.get(look.step, 1.0)
            if {path.since, look.step} <= full and all(map(math.isfinite, slopes)):
                found.append(_Path(look.step - path.since, *slopes))
    return found, last + 1
