"""The conclusions from probes: changes that are not fixes, but whose outcome shows where the cause is."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from surefoot.experiments.run_comparison import RunReading


LEARNED = 0.5
"""If a few rows are repeated, a working model memorizes them: the loss must fall by at least this share."""
FAR_ABOVE = 100.0
"""A loss that is always this many times above the loss on noise shows that nothing was learned, however far it fell."""


def not_learned(few: RunReading, noise: RunReading) -> str | None:
    """Why a few rows were not learned although their loss fell; `None` if they may have been learned.

    A loss that begins at 1e10 falls a long way before anything is learned. The loss on noise, with the same targets, is
    what a model can reach without using the inputs.
    """
    if noise.outcome != "learned" or not few.end > FAR_ABOVE * max(abs(noise.start), abs(noise.end)):
        return None
    return f"a few rows are not learned: their loss ends at {few.end:.3g}, far above {noise.end:.3g} on noise"


def tells(name: str, baseline: RunReading, changed: RunReading) -> str:
    """The text of a probe in the table."""
    if changed.outcome == "too short":
        return changed.words
    if name == "other-seed":
        return (
            "also fails with another seed" if changed.fails else "does not fail with another seed: it depends on chance"
        )
    if name == "tiny-batch":
        if changed.fails:
            return "not even a few rows are learned: check the model, the loss and the update"
        way = f"from {changed.start:.3g} to {changed.end:.3g}"
        if changed.start - changed.end < LEARNED * abs(changed.start):
            return f"a few rows are hardly learned: their loss only falls {way}"
        return f"a few rows are learned ({way}): model and loop work, check the data and its scale"
    if name == "synthetic-inputs":
        same = changed.outcome in ("non-finite", "diverged", "crashed", "spiked")
        if same:
            return "also fails on noise: the values of the inputs are not the cause"
        so = "learns" if changed.outcome == "learned" else "does not fail"
        return f"{so} with inputs of mean 0 and deviation 1: it fails only on its own inputs"
    if baseline.outcome in ("stuck", "slow"):
        near = math.isfinite(changed.end) and changed.end <= baseline.end + max(
            0.05 * abs(baseline.end), 2 * baseline.noise
        )
        return "no worse with shuffled labels: nothing is learned from them" if near else "worse: the labels matter"
    if changed.outcome in ("non-finite", "diverged", "crashed", "spiked"):
        return "also fails with shuffled labels"
    return "does not fail with shuffled labels"
