"""NaN and Inf, in the loss or in any gradient. The one alarm that needs no second signal."""

from __future__ import annotations

from dataclasses import dataclass

from surefoot.detect.arrays import library_of
from surefoot.types import Signals, Verdict


@dataclass(frozen=True)
class NonFinite:
    """The loss or some gradient entry is NaN or Inf.

    A gradient norm that overflowed to Inf while every entry is finite is not this: see `Explosion`.
    """

    def init(self) -> tuple[()]:
        """There is nothing to remember."""
        return ()

    def update(self, state: tuple[()], signals: Signals) -> tuple[tuple[()], Verdict]:
        """Judge one step. What nobody measured counts as healthy."""
        xp = library_of(signals)
        broken = xp.scalar(0.0) > 0
        if signals.loss is not None:
            broken = broken | ~xp.is_finite(xp.scalar(signals.loss))
        if signals.nonfinite is not None:
            broken = broken | (xp.scalar(signals.nonfinite) > 0)
        elif signals.grad_norm is not None:
            broken = broken | ~xp.is_finite(xp.scalar(signals.grad_norm))
        return state, Verdict("nonfinite", broken, severity="error")
