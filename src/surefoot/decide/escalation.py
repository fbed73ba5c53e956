"""How far to go: skip, then back off, then halt, each with a budget that refills.

A step that is not applied costs one skip. When the skips are used up, the learning rate is cut and the skips are full
again; when the cuts are used up, the run halts.

Every healthy step shows that the weights are sound, so `refill_steps` of them give one skip back: a data set with a bad
batch here and there is skipped through for ever, and only refusals that crowd lead further. After `calm_steps` healthy
steps in a row the skips are full and one cut is taken back, so that a rough patch does not slow the rest of the run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from surefoot.errors import require
from surefoot.types import Decision


class EscalationState(NamedTuple):
    """What has been used, and how long it has been calm."""

    skips: float = 0.0
    cuts: int = 0
    calm: int = 0


@dataclass(frozen=True)
class Escalation:
    """Budgets for what may be done about anomalous steps."""

    skips: int = 10
    """Steps that may be left out before the learning rate is cut."""
    cuts: int = 3
    """Learning-rate cuts before the run halts."""
    lr_factor: float = 0.5
    """What one cut multiplies the learning rate by. Cuts compound."""
    refill_steps: int = 20
    """Healthy steps that give one skip back."""
    calm_steps: int = 200
    """Healthy steps in a row after which skips are full and one cut is taken back."""

    def __post_init__(self) -> None:
        require(self.skips >= 0, f"`skips` must not be negative; got {self.skips}.")
        require(self.cuts >= 0, f"`cuts` must not be negative; got {self.cuts}.")
        require(
            0 < self.lr_factor <= 1, f"`lr_factor` must lie in (0, 1]; got {self.lr_factor}. A cut never raises the LR."
        )
        require(self.refill_steps >= 1, f"`refill_steps` must be at least 1; got {self.refill_steps}.")
        require(self.calm_steps >= 1, f"`calm_steps` must be at least 1; got {self.calm_steps}.")

    def init(self) -> EscalationState:
        """Full budgets."""
        return EscalationState()

    def update(self, state: EscalationState, anomalous: bool, reason: str = "") -> tuple[EscalationState, Decision]:
        """Account for one step and say what is to be done about it."""
        if not anomalous:
            state = state._replace(skips=max(state.skips - 1 / self.refill_steps, 0.0), calm=state.calm + 1)
            if state.calm >= self.calm_steps:
                state = EscalationState(cuts=max(state.cuts - 1, 0))
            return state, self._decision("none", state)
        if state.skips + 1 <= self.skips:
            state = EscalationState(state.skips + 1, state.cuts)
            return state, self._decision("skip", state, reason)
        if state.cuts < self.cuts:
            state = EscalationState(0, state.cuts + 1)
            return state, self._decision("back_off", state, reason)
        return state, self._decision("halt", state, reason)

    def _decision(self, action: str, state: EscalationState, reason: str = "") -> Decision:
        return Decision(action, reason, self.lr_factor**state.cuts)  # type: ignore[arg-type]
