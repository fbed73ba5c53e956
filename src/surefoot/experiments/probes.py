"""What the probes tell: changes that nobody would keep, but whose outcome says where the cause lies."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from surefoot.experiments.run_comparison import RunReading


LEARNED = 0.5
"""A few rows that are repeated must be memorized: the loss must fall by at least this share."""
FAR_ABOVE = 100.0
"""A loss so many times above that on noise, first and last, shows nothing learned, however far it fell."""


def not_learned(few: RunReading, noise: RunReading) -> str | None:
    """Why a few rows were not learned although their loss fell; `None` if they may have been.

    A loss that begins at 1e10 falls a long way before anything is learned. What noise in the place of the inputs comes
    to, with the same targets, is what can be had without looking at the inputs at all.
    """
    if noise.outcome != "learned" or not few.end > FAR_ABOVE * max(abs(noise.start), abs(noise.end)):
        return None
    return f"the loss of a few rows ends at {few.end:.3g}, far above the {noise.end:.3g} on noise: they are not learned"


def tells(name: str, baseline: RunReading, changed: RunReading) -> str:
    """One line for the table."""
    if changed.outcome == "too short":
        return changed.words
    if name == "other-seed":
        return (
            "fails with another seed too" if changed.fails else "does not fail with another seed: it depends on chance"
        )
    if name == "tiny-batch":
        if changed.fails:
            return "not even a few rows are learned: look at model, loss and update"
        way = f"from {changed.start:.3g} to {changed.end:.3g}"
        if changed.start - changed.end < LEARNED * abs(changed.start):
            return f"the loss of a few rows only falls {way}: they are hardly learned"
        return f"a few rows are learned ({way}): model and loop can learn, look at data and scale"
    if name == "synthetic-inputs":
        same = changed.outcome in ("non-finite", "diverged", "crashed", "thrown")
        if same:
            return "fails on noise too: not the values of the inputs"
        so = "learns" if changed.outcome == "learned" else "does not fail"
        return f"{so} with inputs of mean 0 and deviation 1: it fails only on its own"
    if baseline.outcome in ("stuck", "slow"):
        near = math.isfinite(changed.end) and changed.end <= baseline.end + max(
            0.05 * abs(baseline.end), 2 * baseline.noise
        )
        return "no worse with shuffled labels: nothing is learned from them" if near else "worse: the labels do count"
    if changed.outcome in ("non-finite", "diverged", "crashed", "thrown"):
        return "fails with shuffled labels too"
    return "does not fail with shuffled labels"
