"""Warm-up followed by a decay, as plain functions that return a torch `LRScheduler`.

Each schedule is a closed form: the factor at step `s` depends on `s` and the settings, never on the factor before. So
nothing drifts, every parameter group keeps its own base rate, and a resumed run continues exactly: build the schedule
with the same settings, **then** load the optimizer's `state_dict` and the schedule's, which holds the step and the base
rates. (Building any torch scheduler sets the rates of step 0, and loading its state does not set them again.) Settings
are not in it, so a run can be resumed with a longer `total_steps` on purpose.

All of them share the warm-up: the factor rises in a straight line from `start` at step 0 to 1 at step `warmup_steps`.
`start` is `1 / (warmup_steps + 1)` unless given, so the first step learns something; `start=0.0` asks for a first step
of zero. Decays reach their `floor` at step `total_steps`, the first one that is no longer taken, so that the last step
learns something too. `floor` is a fraction of the peak. Call `scheduler.step()` once per optimizer step.

Not included: schedules that depend on the loss (torch has `ReduceLROnPlateau`) and momentum cycles (`OneCycleLR`).
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from surefoot.core.settings import is_number, is_whole, shown
from surefoot.errors import require

After = Callable[[int], float]
"""The factor by the number of steps since the end of the warm-up."""


def warmup_constant(optimizer: Optimizer, warmup_steps: int, *, start: float | None = None) -> LRScheduler:
    """Warm up, then keep the learning rate constant."""
    return _schedule(optimizer, warmup_steps, start, _constant)


def warmup_linear(
    optimizer: Optimizer, warmup_steps: int, total_steps: int, *, floor: float = 0.0, start: float | None = None
) -> LRScheduler:
    """Warm up, then fall in a straight line to `floor` at `total_steps`."""
    _check_decay(warmup_steps, total_steps, floor)
    return _schedule(optimizer, warmup_steps, start, partial(_linear, total_steps - warmup_steps, floor))


def warmup_cosine(
    optimizer: Optimizer,
    warmup_steps: int,
    total_steps: int,
    *,
    floor: float = 0.0,
    restarts: int = 0,
    cycle_growth: float = 1.0,
    start: float | None = None,
) -> LRScheduler:
    """Warm up, then fall along half a cosine to `floor` (Loshchilov and Hutter 2017, arXiv:1608.03983).

    `restarts` jumps back to the peak that many times within the same total; each cycle is `cycle_growth` times as long
    as the one before.
    """
    _check_decay(warmup_steps, total_steps, floor)
    if not is_whole(restarts) or not is_number(cycle_growth) or restarts < 0 or cycle_growth <= 0.0:
        raise ValueError(f"Expected `restarts` >= 0 and `cycle_growth` > 0; got {restarts} and {cycle_growth}.")
    lengths = [cycle_growth**cycle for cycle in range(restarts + 1)]
    span = total_steps - warmup_steps
    bounds = tuple(span * sum(lengths[:cycle]) / sum(lengths) for cycle in range(restarts + 2))
    return _schedule(optimizer, warmup_steps, start, partial(_cosine, bounds, floor))


def warmup_step(
    optimizer: Optimizer,
    warmup_steps: int,
    milestones: Sequence[int],
    *,
    gamma: float = 0.1,
    start: float | None = None,
) -> LRScheduler:
    """Warm up, hold, and multiply by `gamma` at each of `milestones`, counted from the start of training."""
    _check_warmup(warmup_steps)
    require(
        isinstance(milestones, Sequence) and all(map(is_whole, milestones)),
        f"`milestones` must be a list of steps, such as [3_000, 6_000]; got {shown(milestones)}.",
    )
    if list(milestones) != sorted(set(milestones)) or any(milestone <= warmup_steps for milestone in milestones):
        raise ValueError(
            f"`milestones` must rise and come after the warm-up of {warmup_steps} steps; got {list(milestones)}."
        )
    if not is_number(gamma) or gamma <= 0.0:
        raise ValueError(f"`gamma` must be positive; got {gamma}. To stop learning, stop training.")
    after = tuple(milestone - warmup_steps for milestone in milestones)
    return _schedule(optimizer, warmup_steps, start, partial(_step, after, gamma))


def warmup_inverse_sqrt(optimizer: Optimizer, warmup_steps: int, *, start: float | None = None) -> LRScheduler:
    """Warm up, then fall as `sqrt(warmup_steps / step)`, without an end (Vaswani et al. 2017).

    The peak is the optimizer's own learning rate, not a function of the model's width as in that paper.
    """
    _check_warmup(warmup_steps)
    if warmup_steps < 1:
        raise ValueError(
            f"`warmup_steps` must be at least 1: it sets how fast the rate falls; got {warmup_steps}. "
            "For a decay without warm-up use `warmup_cosine(optimizer, 0, total_steps)`."
        )
    return _schedule(optimizer, warmup_steps, start, partial(_inverse_sqrt, warmup_steps))


def warmup_stable_decay(
    optimizer: Optimizer,
    warmup_steps: int,
    total_steps: int,
    decay_steps: int,
    *,
    floor: float = 0.0,
    shape: Literal["linear", "1-sqrt"] = "linear",
    start: float | None = None,
) -> LRScheduler:
    """Warm up, hold, and fall to `floor` over the last `decay_steps` (Hu et al. 2024, arXiv:2404.06395).

    `shape="1-sqrt"` falls fast at first (Hägele et al. 2024, arXiv:2405.18392).
    """
    _check_decay(warmup_steps, total_steps, floor)
    if shape not in ("linear", "1-sqrt"):
        raise ValueError(f"`shape` must be 'linear' or '1-sqrt'; got {shape!r}.")
    require(is_whole(decay_steps), f"`decay_steps` must be a whole number; got {shown(decay_steps)}.")
    hold = total_steps - warmup_steps - decay_steps
    if decay_steps < 1 or hold < 0:
        raise ValueError(
            f"`decay_steps` must be from 1 to {total_steps - warmup_steps}, what is left after the warm-up; "
            f"got {decay_steps}."
        )
    return _schedule(optimizer, warmup_steps, start, partial(_stable_decay, hold, decay_steps, floor, shape))


def _schedule(optimizer: Optimizer, warmup_steps: int, start: float | None, after: After) -> LRScheduler:
    _check_warmup(warmup_steps)
    require(
        hasattr(optimizer, "param_groups"), f"`optimizer` must be a torch optimizer; got {type(optimizer).__name__}."
    )
    require(start is None or is_number(start), f"`start` must be a number, or None; got {shown(start)}.")
    first = 1.0 / (warmup_steps + 1) if start is None else start
    if not 0.0 <= first <= 1.0:
        raise ValueError(f"`start` is the fraction of the peak at the first step, from 0 to 1; got {start}.")
    return LambdaLR(optimizer, partial(_factor, warmup_steps, first, after))


def _factor(warmup_steps: int, start: float, after: After, step: int) -> float:
    if step < warmup_steps:
        return start + (1.0 - start) * step / warmup_steps
    return after(step - warmup_steps)


def _constant(step: int) -> float:
    return 1.0


def _linear(span: int, floor: float, step: int) -> float:
    return floor + (1.0 - floor) * (1.0 - min(1.0, step / span))


def _cosine(bounds: tuple[float, ...], floor: float, step: int) -> float:
    if step >= bounds[-1]:
        return floor
    cycle = max(index for index, bound in enumerate(bounds) if bound <= step)
    progress = (step - bounds[cycle]) / (bounds[cycle + 1] - bounds[cycle])
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))


def _step(milestones: tuple[int, ...], gamma: float, step: int) -> float:
    return float(gamma ** sum(step >= milestone for milestone in milestones))


def _inverse_sqrt(warmup_steps: int, step: int) -> float:
    return math.sqrt(warmup_steps / (warmup_steps + step))


def _stable_decay(hold: int, decay_steps: int, floor: float, shape: str, step: int) -> float:
    progress = min(1.0, max(0.0, (step - hold) / decay_steps))
    left = 1.0 - progress if shape == "linear" else 1.0 - math.sqrt(progress)
    return floor + (1.0 - floor) * left


def _check_warmup(warmup_steps: int) -> None:
    require(
        is_whole(warmup_steps) and warmup_steps >= 0,
        f"`warmup_steps` must be a whole number, and must not be negative; got {shown(warmup_steps)}. 0 means no "
        "warm-up.",
    )


def _check_decay(warmup_steps: int, total_steps: int, floor: float) -> None:
    _check_warmup(warmup_steps)
    require(
        is_whole(total_steps), f"`total_steps` must be a whole number of optimizer steps; got {shown(total_steps)}."
    )
    require(is_number(floor), f"`floor` must be a number; got {shown(floor)}.")
    if total_steps <= warmup_steps:
        raise ValueError(
            f"`total_steps` counts the warm-up too and must exceed it; got {total_steps} with {warmup_steps=}. "
            "Count optimizer steps, not epochs."
        )
    if not 0.0 <= floor <= 1.0:
        raise ValueError(f"`floor` is a fraction of the peak, from 0 to 1, not a learning rate; got {floor}.")
