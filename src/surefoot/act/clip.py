"""Clippers that multiply the gradient by one factor, or by one factor per tensor.

A clipper is a frozen dataclass with pure `init(count)` and `update(state, norms) -> (state, factor)`. The factor is a
device tensor in (0, 1], 0-d for all gradients together or one entry per tensor, so it can be folded into a fused
optimizer's own kernel. A non-finite norm gives the factor 1 and does not change the state: multiplying by it would
break every gradient, and another part decides whether to skip such a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from surefoot.core.settings import check_types
from surefoot.errors import require

if TYPE_CHECKING:
    from surefoot.types import GradientNorms


def limit_factor(norm: Tensor, limit: Tensor | float) -> Tensor:
    """The factor that reduces `norm` to `limit`, at most 1; 1 if either is not finite.

    The 1e-6 is `torch.nn.utils.clip_grad_norm_`'s, for the same bits.
    """
    factor = torch.clamp(limit / (norm + 1e-6), max=1.0)
    return torch.where(torch.isfinite(norm) & torch.isfinite(factor), factor, 1.0)


def _require_warmup(steps: int) -> None:
    require(steps >= 1, f"`warmup_steps` must be at least 1 to have a first threshold; got {steps}.")


def _require_limit(name: str, value: float | None) -> None:
    require(value is None or value > 0, f"`{name}` must be positive; got {value}. To clip nothing, pass no clipper.")


@dataclass(frozen=True)
class ClipByNorm:
    """Scale all gradients together so that their global norm is at most `max_norm`."""

    max_norm: float
    """The largest norm of all gradients together."""

    def __post_init__(self) -> None:
        check_types(self)
        _require_limit("max_norm", self.max_norm)

    def init(self, count: int) -> tuple[()]:
        """No state."""
        return ()

    def update(self, state: tuple[()], norms: GradientNorms) -> tuple[tuple[()], Tensor]:
        """The factor for this step."""
        return state, limit_factor(norms.total, self.max_norm)


WARMUP_REACH = 10.0
"""The maximum multiple of its running mean that a norm counts for while `AdaptiveGradientClipper` warms up; and the
inverse, at its first steps."""


class AdaptiveState(NamedTuple):
    """Running mean of the clipped norm, and the number of steps."""

    mean: Tensor
    seen: Tensor


@dataclass(frozen=True)
class AdaptiveGradientClipper:
    """Clip to `factor` times a running mean of recent norms.

    The mean uses the clipped norm, so an explosion raises it by at most `max_growth` per step, however large it is; a
    NaN or an Inf never enters. One pass over the gradients, two numbers of memory.
    """

    factor: float = 2.0
    """The maximum multiple of the running mean."""
    momentum: float = 0.99
    """Weight of the past in the running mean."""
    max_growth: float = 1.05
    """The maximum growth of the mean in one step."""
    warmup_steps: int = 20
    """The number of steps over which the mean is a plain average; they are clipped at `warmup_max_norm`."""
    warmup_max_norm: float | None = None
    """Limit during warm-up; `None` leaves the first steps unclipped."""
    max_norm: float | None = None
    """An absolute limit, independent of the history."""

    def __post_init__(self) -> None:
        check_types(self)
        require(self.factor >= 1, f"`factor` must be at least 1; got {self.factor}. Below it every step is clipped.")
        require(0 <= self.momentum < 1, f"`momentum` must lie in [0, 1); got {self.momentum}.")
        require(self.max_growth > 1, f"`max_growth` must be above 1; got {self.max_growth}. The mean could not follow.")
        _require_warmup(self.warmup_steps)
        _require_limit("warmup_max_norm", self.warmup_max_norm)
        _require_limit("max_norm", self.max_norm)

    def init(self, count: int) -> AdaptiveState:
        """No history."""
        return AdaptiveState(torch.zeros(()), torch.zeros(()))

    def update(self, state: AdaptiveState, norms: GradientNorms) -> tuple[AdaptiveState, Tensor]:
        """The factor for this step, from the history before it."""
        norm = norms.total.to(torch.float32)
        mean, seen = (part.to(norm.device) for part in state)
        warming = (seen < self.warmup_steps) | (mean <= 0)
        early = torch.inf if self.warmup_max_norm is None else self.warmup_max_norm
        limit = torch.where(warming, early, self.factor * mean)
        if self.max_norm is not None:
            limit = limit.clamp(max=self.max_norm)
        clipped = torch.minimum(norm, limit)
        # One explosion must not determine the first average, nor one tiny norm at the very first steps. Only at those:
        # the rest of the warm-up corrects what one tiny norm takes from the mean then.
        first = warming & (seen > 0) & (seen <= max(1, self.warmup_steps // 8))
        so_far = torch.where(first, torch.minimum(mean, WARMUP_REACH * clipped), mean)
        clipped = torch.where(warming & (seen > 0), torch.minimum(clipped, WARMUP_REACH * so_far), clipped)
        weight = torch.where(warming, seen / (seen + 1), self.momentum)
        moved = weight * so_far + (1 - weight) * clipped
        moved = torch.where(warming, moved, torch.minimum(moved, self.max_growth * mean))
        usable = torch.isfinite(norm) & (norm > 0)  # a gradient of exactly 0 does not indicate the size of others
        state = AdaptiveState(torch.where(usable, moved, mean), seen + usable)
        return state, torch.where(torch.isinf(limit), 1.0, limit_factor(norm, limit))


class ZScoreState(NamedTuple):
    """Running mean and variance of the clipped norm."""

    mean: Tensor
    variance: Tensor
    seen: Tensor


@dataclass(frozen=True)
class ClipByZScore:
    """ZClip (Kumar et al., 2025): a norm more than `threshold` deviations above its running mean is reduced.

    Larger norms are reduced more: a norm at z deviations is reduced to `threshold**2 / z` deviations. Mean and variance
    are exponential averages of the clipped norm, started from the plain ones of the warm-up.
    """

    threshold: float = 2.5
    """The number of standard deviations above the mean of the recent norms that are accepted."""
    momentum: float = 0.97
    """The weight of the past in the mean and the deviation."""
    warmup_steps: int = 25
    """The number of norms before anything is clipped."""

    def __post_init__(self) -> None:
        check_types(self)
        require(self.threshold > 0, f"`threshold` must be positive; got {self.threshold}.")
        require(0 <= self.momentum < 1, f"`momentum` must lie in [0, 1); got {self.momentum}.")
        require(
            self.warmup_steps >= 2,
            f"`warmup_steps` must be at least 2 to have a variance; got {self.warmup_steps}.",
        )

    def init(self, count: int) -> ZScoreState:
        """No history."""
        return ZScoreState(torch.zeros(()), torch.zeros(()), torch.zeros(()))

    def update(self, state: ZScoreState, norms: GradientNorms) -> tuple[ZScoreState, Tensor]:
        """The factor for this step, from the history before it."""
        norm = norms.total.to(torch.float32)
        mean, variance, seen = (part.to(norm.device) for part in state)
        warming = seen < self.warmup_steps
        deviation = torch.sqrt(variance)
        z = (norm - mean) / (deviation + 1e-6)
        pulled_in = mean + self.threshold**2 / z * deviation
        clipped = torch.where((z > self.threshold) & ~warming, pulled_in, norm)
        # Welford's update while warming up, exponential averages afterwards.
        weight = torch.where(warming, 1 / (seen + 1), 1 - self.momentum)
        step = clipped - mean
        next_mean = mean + weight * step
        rest = clipped - next_mean
        next_variance = (1 - weight) * variance + weight * rest * torch.where(warming, step, rest)
        usable = torch.isfinite(norm)
        state = ZScoreState(
            torch.where(usable, next_mean, mean), torch.where(usable, next_variance, variance), seen + usable
        )
        return state, torch.where(clipped < norm, limit_factor(norm, clipped), 1.0)


class QuantileState(NamedTuple):
    """The last norms, oldest first; NaN where there is none yet."""

    window: Tensor
    seen: Tensor


@dataclass(frozen=True)
class ClipByQuantile:
    """AutoClip (Seetharaman et al., 2020) over a bounded window: clip to a quantile of recent norms.

    The norms of the window are those before clipping, as in the paper: one explosion moves a quantile by one rank,
    however large it is. The paper uses the quantile 0.1, which clips nine steps of ten.
    """

    quantile: float = 0.9
    """Which quantile of the recent norms is the limit, between 0 and 1."""
    window_steps: int = 1_000
    """The number of norms in the window."""
    warmup_steps: int = 20
    """The number of steps before the first clip."""

    def __post_init__(self) -> None:
        check_types(self)
        require(0 < self.quantile <= 1, f"`quantile` must lie in (0, 1]; got {self.quantile}.")
        require(self.window_steps >= 2, f"`window_steps` must be at least 2; got {self.window_steps}.")
        _require_warmup(self.warmup_steps)

    def init(self, count: int) -> QuantileState:
        """An empty window."""
        return QuantileState(torch.full((self.window_steps,), torch.nan), torch.zeros(()))

    def update(self, state: QuantileState, norms: GradientNorms) -> tuple[QuantileState, Tensor]:
        """The factor for this step; the step's own norm is part of the window, as in the paper."""
        norm = norms.total.to(torch.float32)
        window, seen = (part.to(norm.device) for part in state)
        usable = torch.isfinite(norm)
        window = torch.where(usable, torch.cat([window[1:], norm[None]]), window)
        seen = seen + usable
        ordered = torch.sort(window).values  # NaN sorts to the end
        place = (seen.clamp(max=self.window_steps) - 1).clamp(min=0) * self.quantile
        below, above = place.floor(), place.ceil()
        ends = ordered.gather(0, torch.stack([below, above]).to(torch.int64))
        limit = ends[0] + (place - below) * (ends[1] - ends[0])
        return QuantileState(window, seen), torch.where(seen > self.warmup_steps, limit_factor(norm, limit), 1.0)


class PerTensorState(NamedTuple):
    """Running mean of each tensor's clipped norm."""

    means: Tensor
    seen: Tensor


@dataclass(frozen=True)
class ClipPerTensor:
    """AdaGC (Wang et al., 2025): each tensor is clipped relative to a running mean of its own clipped norm.

    During warm-up the gradients are clipped together at `warmup_max_norm`, and each mean is the smallest norm seen. A
    gradient that has been exactly 0 has no history: it is not clipped until it has one.
    """

    factor: float = 1.05
    """The maximum multiple of its average norm."""
    momentum: float = 0.98
    """The weight of the past in the average norm."""
    warmup_steps: int = 100
    """The number of first steps that are clipped by the global norm."""
    warmup_max_norm: float = 1.0
    """The largest global norm in these steps."""

    def __post_init__(self) -> None:
        check_types(self)
        require(self.factor >= 1, f"`factor` must be at least 1; got {self.factor}. Every gradient would shrink to 0.")
        require(0 <= self.momentum < 1, f"`momentum` must lie in [0, 1); got {self.momentum}.")
        _require_warmup(self.warmup_steps)
        _require_limit("warmup_max_norm", self.warmup_max_norm)

    def init(self, count: int) -> PerTensorState:
        """No history for any tensor."""
        return PerTensorState(torch.zeros(count), torch.zeros(()))

    def update(self, state: PerTensorState, norms: GradientNorms) -> tuple[PerTensorState, Tensor]:
        """One factor per tensor."""
        each = norms.each.to(torch.float32)
        means, seen = (part.to(each.device) for part in state)
        warming = seen < self.warmup_steps
        known = means > 0
        together = limit_factor(norms.total.to(torch.float32), self.warmup_max_norm)
        own = torch.where(known, torch.clamp(self.factor * means / each, max=1.0), 1.0)
        factor = torch.where(warming, together, own)
        clipped = factor * each
        settled = torch.where(
            warming, torch.minimum(means, clipped), self.momentum * means + (1 - self.momentum) * clipped
        )
        settled = torch.where(known, settled, clipped)
        usable = torch.isfinite(norms.total)
        means = torch.where(usable & (clipped > 0), settled, means)
        return PerTensorState(means, seen + usable), torch.where(usable & torch.isfinite(factor), factor, 1.0)
