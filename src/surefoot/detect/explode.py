"""A gradient norm far beyond anything the run has accepted.

The reference is the largest norm accepted so far, fading slowly, and not an average: gradient norms have heavy tails,
small batches and nearly solved tasks more than others, and a rule that compares with the middle of the distribution
cries wolf in the tail. Compared with the maximum, a healthy stream has to exceed its own record many times over in one
step. What is judged anomalous does not raise the reference; what keeps coming for `patience` steps is a new level, not
an outlier, and is accepted.

- A gradient no larger than the weights is ordinary in size, however unusual for the run: before its first reward, a
  policy that explores has gradients of next to nothing, and the first real one is what it has been waiting for. So the
  norm must also exceed `min_to_weights` times the norm of the parameters, where that is known.
- In the first `min_steps` steps, when a record has hardly been set, `early_factor` takes the place of `factor`.
- The record fades over `half_life_steps`, but no faster than the run gets longer: a run of `n` steps has to allow for
  the hard example that comes once in `n` steps, which a fixed half-life would have forgotten by then.
- A gradient of exactly 0 (a hinge loss with its margin kept, a reward not yet found) says nothing about the size of
  gradients, so it neither counts as a step nor lets the record fade.
- Refusals need not be strictly in a row to count as a level: a healthy step takes back a twentieth of one, so an
  "outlier" that is more than one step in twenty is accepted in the end, and a bad batch once an epoch is not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from surefoot.detect.arrays import Array, library_of
from surefoot.detect.records import fade, forgive
from surefoot.errors import require
from surefoot.types import Signals, Verdict

OVERFLOW = 1.8e19
"""A gradient whose square overflows fp32 would put an Inf into second moments that never leaves them."""
EARLIEST = 3
"""Accepted steps with a gradient before any comparison is made."""


class ExplosionState(NamedTuple):
    """Fading maximum, how many steps with a gradient were accepted, how many were refused (nearly) in a row."""

    peak: Array
    accepted: Array
    refused: Array


@dataclass(frozen=True)
class Explosion:
    """The gradient norm exceeds `factor` times the largest norm accepted so far."""

    factor: float = 50.0
    """How far beyond the fading maximum is anomalous."""
    half_life_steps: float = 2_000.0
    """The maximum halves over this many steps, so that a rough start is forgotten, or over as many as the run has
    behind it, whichever is longer."""
    min_to_weights: float = 1.0
    """… and beyond how many times the norm of the parameters."""
    min_steps: int = 20
    """Accepted steps with a gradient before `factor` holds."""
    early_factor: float = 1_000.0
    """What holds until then, from the third on. Before that only a norm whose square overflows fp32 is anomalous."""
    patience: int = 10
    """After so many refusals in a row, or nearly so, the norm is taken for a new level and accepted."""
    signal: str = "grad_norm"

    def __post_init__(self) -> None:
        require(self.factor > 1, f"`factor` must be above 1; got {self.factor}. Every step would be anomalous.")
        require(self.half_life_steps > 0, f"`half_life_steps` must be positive; got {self.half_life_steps}.")
        require(
            self.early_factor >= self.factor,
            f"`early_factor` must be at least `factor`; got {self.early_factor} and {self.factor}.",
        )
        require(self.min_to_weights >= 0, f"`min_to_weights` must not be negative; got {self.min_to_weights}.")
        require(self.min_steps >= 1, f"`min_steps` must be at least 1; got {self.min_steps}.")
        require(self.patience >= 1, f"`patience` must be at least 1; got {self.patience}.")

    def init(self) -> ExplosionState:
        """No maximum yet."""
        return ExplosionState(np.zeros(()), np.zeros(()), np.zeros(()))

    def update(self, state: ExplosionState, signals: Signals) -> tuple[ExplosionState, Verdict]:
        """Judge one step."""
        xp = library_of(signals)
        value = xp.scalar(signals.get(self.signal))
        peak, accepted, refused = (xp.own(part) for part in state)
        factor = xp.where(accepted >= self.min_steps, self.factor, self.early_factor)
        beyond = (value > factor * peak) & (peak > 0) & (accepted >= EARLIEST)
        if signals.param_norm is not None:
            beyond = beyond & (value > self.min_to_weights * xp.scalar(signals.param_norm))
        overflowing = value > OVERFLOW
        anomalous = overflowing | (beyond & (refused < self.patience))
        healthy = xp.is_finite(value) & ~anomalous
        telling = healthy & (value > 0)
        next_state = ExplosionState(
            xp.where(telling, xp.maximum(peak * fade(accepted, self.half_life_steps), value), peak),
            accepted + telling,
            # A norm that overflowed is no level that could be accepted, so it does not count towards one.
            xp.where(healthy, forgive(refused, beyond), refused + (anomalous & ~overflowing)),
        )
        return next_state, Verdict("explosion", anomalous, severity="error")
