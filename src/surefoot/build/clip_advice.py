"""Judge the clipping limit by the observed gradient norms.

Clipping is for rare steps. A limit that affects most steps has become part of the learning rate: every update has
the same length, whatever the gradient is. One that affects none does not protect. And a norm that grows, jumps by
orders of magnitude or stops being finite is a problem that clipping hides rather than solves.

`clip_advice` is a pure function of a sequence of norms, taken **before** clipping, from a live run or a log.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal

import numpy as np
from torch import Tensor

from surefoot.core.settings import shown
from surefoot.errors import require

Verdict = Literal["insufficient_data", "no_limit", "fits", "raise", "lower", "hiding_a_problem"]

FEWEST_STEPS = 50
"""Norms needed before a percentile in the tail means anything."""

MOSTLY = 0.5
"""Share of clipped steps above which clipping is no longer an exception."""

TARGET_PERCENTILE = 95.0
"""The suggested limit leaves this share of the steps alone."""

GROWTH = 3.0
"""Ratio between the median norms of the last and the first third above which the norm counts as growing."""

HEAVY_TAIL = 100.0
"""Ratio of the 99th percentile to the median above which single steps count as jumps."""


@dataclass(frozen=True)
class ClipAdvice:
    """The judgement of a limit."""

    verdict: Verdict
    """`fits`, or what to do; `hiding_a_problem` when another limit would not help."""

    summary: str
    """One sentence, with the numbers."""

    steps: int
    """How many norms were given."""

    nonfinite_steps: int
    """How many of them were NaN or infinite."""

    clipped_share: float | None
    """Share of the finite norms above the limit; `None` without a limit."""

    suggested_max_norm: float | None
    """A limit that would clip 1 step in 20; `None` if there is too little data or the norms are not a guide."""

    percentiles: dict[int, float]
    """The 5th, 50th, 90th, 95th and 99th percentile of the finite norms."""

    def __str__(self) -> str:
        return self.summary


def clip_advice(norms: Iterable[float] | Tensor, max_norm: float | None = None) -> ClipAdvice:
    """Judge a clipping limit (or suggest a first one) from the norms before clipping, in the order of the steps."""
    if max_norm is not None and not (max_norm > 0.0 and math.isfinite(max_norm)):
        raise ValueError(
            f"`max_norm` must be positive and finite; got {max_norm}. Leave it out when nothing is clipped."
        )
    # NumPy has no bfloat16, and takes no tensor from a device or with a gradient.
    if isinstance(norms, Tensor):
        given: Any = norms.detach().cpu().double()
    else:
        is_several = isinstance(norms, Iterable) and not isinstance(norms, str)
        require(is_several, f"`norms` must be a list or a tensor of norms; got {shown(norms)}.")
        given = [norm.item() if isinstance(norm, Tensor) else norm for norm in norms]
        odd = next((norm for norm in given if not isinstance(norm, Real)), None)
        require(odd is None, f"`norms` must contain numbers only; got {shown(odd)} among them.")
    values = np.asarray(given, dtype=np.float64).ravel()
    if (values < 0.0).any():
        raise ValueError(f"`norms` must not be negative; the smallest is {values.min():.4g}.")
    finite = values[np.isfinite(values)]
    broken = len(values) - len(finite)
    if len(finite) < FEWEST_STEPS:
        summary = f"{len(finite)} finite norms are too few to judge by; {FEWEST_STEPS} are needed."
        if broken >= FEWEST_STEPS:
            summary = f"{broken} of {len(values)} norms are not finite, which no limit can clip."
            return ClipAdvice("hiding_a_problem", summary, len(values), broken, None, None, {})
        return ClipAdvice("insufficient_data", summary, len(values), broken, None, None, {})
    _refuse_clipped_norms(finite, max_norm)
    percentiles = {at: float(np.percentile(finite, at)) for at in (5, 50, 90, 95, 99)}
    share = None if max_norm is None else float((finite > max_norm).mean())
    verdict, summary = _judge(finite, broken, percentiles, max_norm, share)
    suggested = None if verdict == "hiding_a_problem" else float(np.percentile(finite, TARGET_PERCENTILE))
    return ClipAdvice(verdict, summary, len(values), broken, share, suggested, percentiles)


def _refuse_clipped_norms(finite: np.ndarray, max_norm: float | None) -> None:
    if max_norm is None:
        return
    at_the_limit = np.isclose(finite, max_norm, rtol=1e-4).mean()
    if at_the_limit > 0.1 and finite.max() <= max_norm * (1.0 + 1e-4):
        raise ValueError(
            f"{at_the_limit:.0%} of the norms equal the limit {max_norm:g} and none exceeds it: these look like norms "
            "after clipping. Pass the norms before it, which `clip_grad_norm_` returns."
        )


def _judge(
    finite: np.ndarray, broken: int, percentiles: dict[int, float], max_norm: float | None, share: float | None
) -> tuple[Verdict, str]:
    median, tail, target = percentiles[50], percentiles[99], percentiles[95]
    third = len(finite) // 3
    growth = float(np.median(finite[-third:])) / max(float(np.median(finite[:third])), 1e-300)
    clipped = "" if share is None else f"{share:.0%} of steps are clipped at {max_norm:g}"
    if broken:
        return "hiding_a_problem", f"{broken} of {len(finite) + broken} norms are not finite, which no limit can clip."
    if growth >= GROWTH and (share is None or share > 0.0):
        return (
            "hiding_a_problem",
            f"The norm grew {growth:.3g}-fold from the first third to the last. {clipped}".strip(),
        )
    if median > 0.0 and tail / median >= HEAVY_TAIL:
        return "hiding_a_problem", f"Single steps jump to {tail / median:.3g} times the median norm. {clipped}".strip()
    if max_norm is None or share is None:
        return "no_limit", f"No limit in use; {target:.3g} would clip 1 step in 20."
    if share > MOSTLY:
        return "raise", f"{clipped}: the limit sets the size of most updates. Raise it to about {target:.3g}."
    if share == 0.0 and max_norm > 2.0 * tail:
        return (
            "lower",
            f"Nothing is clipped: {max_norm:g} is far above the 99th percentile. {target:.3g} would protect.",
        )
    return "fits", f"{clipped}; the norms have a median of {median:.3g} and a 99th percentile of {tail:.3g}."
