"""Step 7: the gradient norms of the probe at the user's own rate, against the limit they clip at, if it is known."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from surefoot.doctor.checks import Check, from_catalogue, passed, skipped

if TYPE_CHECKING:
    from surefoot.doctor.context import CheckContext

STEP = 7
_NAME = "clipping"
_FEWEST = 8
_JUMP = 100.0
_BY_FAR = 10.0
_NEARLY_ALL = 0.9


def check_clipping(context: CheckContext) -> list[Check]:
    """Compare norms with the limit, or suggest one."""
    norms = sorted(norm for norm in context.gradient_norms if math.isfinite(norm))
    if len(norms) < _FEWEST:
        return [skipped(STEP, _NAME, f"only {len(norms)} gradient norms were seen in step 5")]
    median, high = norms[len(norms) // 2], norms[min(len(norms) - 1, round(0.95 * len(norms)))]
    story = f"gradient norms have a median of {median:.3g} and a 95th percentile of {high:.3g} over {len(norms)} steps"
    if context.clip is not None:
        return [_with_limit(context.clip, norms, median, story)]
    jump = _largest_jump(context.gradient_norms)
    if jump > _JUMP and not context.found("lr.too-high"):
        summary = f"{story}, and one is {jump:.3g} times the largest before it"
        return [
            from_catalogue(STEP, _NAME, "warn", "model.exploding-gradient", summary, jump, f"up to {_JUMP:g} times")
        ]
    return [passed(STEP, _NAME, f"{story}; a limit near {high:.2g} would touch 1 step in 20", median)]


def _largest_jump(norms: list[float]) -> float:
    """How far a norm exceeds the largest one before it; the first few set the record."""
    record, jump = max(norms[:3]), 1.0
    for norm in norms[3:]:
        if math.isfinite(norm) and record > 0.0:
            jump = max(jump, norm / record)
        record = max(record, norm)
    return jump


def _with_limit(limit: float, norms: list[float], median: float, story: str) -> Check:
    clipped = sum(norm > limit for norm in norms) / len(norms)
    summary = f"a limit of {limit:g} clips {clipped:.0%} of the steps; {story}"
    expected = "most steps untouched, or touched lightly"
    if clipped > _NEARLY_ALL and median > _BY_FAR * limit:
        return from_catalogue(STEP, _NAME, "warn", "clip.saturated", summary, clipped, expected)
    return passed(STEP, _NAME, summary, clipped, expected)
