"""What the probes tell: changes that nobody would keep, but whose outcome says where the cause lies."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from surefoot.diagnose.experiments.judge import Reading


def tells(name: str, baseline: Reading, changed: Reading) -> str:
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
        return "a few rows are learned: model and loop can learn, look at data and scale"
    if name == "synthetic-inputs":
        same = changed.outcome in ("non-finite", "diverged", "crashed", "thrown")
        return "fails on noise too: not the values of the inputs" if same else "fails only on its own inputs"
    if baseline.outcome in ("stuck", "slow"):
        near = math.isfinite(changed.end) and changed.end <= baseline.end + max(
            0.05 * abs(baseline.end), 2 * baseline.noise
        )
        return "no worse with shuffled labels: nothing is learned from them" if near else "worse: the labels do count"
    if changed.outcome in ("non-finite", "diverged", "crashed", "thrown"):
        return "fails with shuffled labels too"
    return "does not fail with shuffled labels"
