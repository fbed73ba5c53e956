"""Step 7: the gradient norms of the rehearsal, compared with the user's clipping limit, if it is known."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from surefoot.doctor.checks import Check, passed, skipped

if TYPE_CHECKING:
    from surefoot.doctor.context import CheckContext

STEP = 7
_NAME = "clipping"
_FEWEST = 8


def check_clipping(context: CheckContext) -> list[Check]:
    """Report what the norms show, or suggest a limit."""
    norms = sorted(norm for norm in context.gradient_norms if math.isfinite(norm))
    if context.optimizer is None or len(norms) < _FEWEST:
        return [skipped(STEP, _NAME, f"only {len(norms)} gradient norms were seen with an optimizer")]
    median, high = norms[len(norms) // 2], norms[min(len(norms) - 1, round(0.95 * len(norms)))]
    story = f"gradient norms have a median of {median:.3g} and a 95th percentile of {high:.3g} over {len(norms)} steps"
    if context.clip is not None:
        clipped = sum(norm > context.clip for norm in norms) / len(norms)
        summary = f"a limit of {context.clip:g} clips {clipped:.0%} of the steps; {story}"
        sound = passed(STEP, _NAME, summary, clipped, "most steps not clipped, or only slightly")
        return [context.judged(("clip.saturated",), sound)]
    sound = passed(
        STEP, _NAME, f"{story}; a limit of about {high:.2g} would clip 1 step in 20", median, "no sudden jumps"
    )
    return [context.judged(("model.exploding-gradient",), sound)]
