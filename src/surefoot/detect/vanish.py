"""Early layers that get next to no gradient while the last ones do.

The ratio between layers of the same step is what counts, not the size: at the end of a good run every gradient is
small. Only weights of rank two and more are compared, and the ratio must stay tiny, so that zero-initialised branches,
whose gradients are 0 for a step or two, are no alarm. A layer whose gradient is exactly 0 is another matter (a dead or
detached one) and is left out here.
"""

from __future__ import annotations

from dataclasses import dataclass

from surefoot.detect.windows import host_float
from surefoot.errors import require
from surefoot.types import Signals, Verdict


@dataclass(frozen=True)
class Vanishing:
    """The first layers' gradients are below `ratio` of the last layers', `steps` steps in a row."""

    ratio: float = 1e-6
    """First to last gradient norm below which the gradient has vanished."""
    steps: int = 50

    def __post_init__(self) -> None:
        require(0 < self.ratio < 1, f"`ratio` must lie between 0 and 1; got {self.ratio}.")
        require(self.steps >= 1, f"`steps` must be at least 1; got {self.steps}.")

    def init(self) -> int:
        """How many steps in a row the ratio has been tiny."""
        return 0

    def update(self, state: int, signals: Signals) -> tuple[int, Verdict]:
        """Judge one step. Without per-layer norms there is no verdict."""
        healthy = Verdict("vanishing", False)
        if signals.layers is None or (host_float(signals.nonfinite) or 0) > 0:
            return state, healthy
        weights = signals.layers.weights()
        if len(weights) < 3:
            return 0, healthy
        (first_name, first), (last_name, last) = weights[0], weights[-1]
        if last == 0.0 or first >= self.ratio * last:
            return 0, healthy
        run = state + 1
        if run < self.steps:
            return run, healthy
        return run, Verdict(
            "vanishing",
            True,
            "warning",
            f"gradient of {first_name} is {first / last:.2g} of that of {last_name}, for {run} steps",
            {"first": first_name, "last": last_name, "first_norm": first, "last_norm": last, "steps": run},
        )
