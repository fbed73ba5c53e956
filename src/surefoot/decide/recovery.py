"""What is done about anomalous steps: `Escalation` (skip, back off, halt) and `TrainingRecovery` (go back to a state).

Every action has a budget that refills while the run is healthy. Both are pure: `update(state, ...)` accounts for one
step and returns the next state and a `Decision`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from surefoot.errors import require
from surefoot.types import Decision

if TYPE_CHECKING:
    from surefoot.types import Action


class EscalationState(NamedTuple):
    """What has been used, and how long it has been calm."""

    skips: float = 0.0
    cuts: int = 0
    calm: int = 0


@dataclass(frozen=True)
class Escalation:
    """Budgets for what may be done about anomalous steps.

    A step that is not applied costs one skip. When the skips are used up, the learning rate is cut and the skips are
    full again; when the cuts are used up, the run halts.

    Every healthy step shows that the weights are sound, so `refill_steps` of them give one skip back: a data set with a
    bad batch here and there is skipped through indefinitely, and only many refusals within a short time lead further.
    After `calm_steps` healthy steps in a row the skips are full and one cut is taken back, so that a rough patch does
    not slow the rest of the run.
    """

    skips: int = 10
    """Steps that may be skipped before the learning rate is cut."""
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


SETTLED_STEPS = 5
"""Healthy steps in a row that end an episode of unhealthy ones. A run that diverges has low losses at times, too."""
TRIAL_STEPS = 3
"""Unhealthy steps in a row after a return that show it was no help."""
LATE_STEPS = 7
"""How much later mean losses show damage than single ones: most losses of a block of `LostProgress` must be high."""
TRIAL_SETTLED_STEPS = 12
"""Healthy steps in a row that settle a return that mean losses led to: the means take some steps to rise again. One is
enough where single losses did."""
DOUBT_FACTOR = 4
"""What a return that was declined or had to be taken back multiplies the patience by."""


class RecoveryState(NamedTuple):
    """Where the run stands. Counts are of steps."""

    unhealthy: int = 0
    """Unhealthy steps of the episode under way."""
    refused: int = 0
    """Refused steps in a row."""
    onset: int = -1
    """The first step of the episode under way; -1 for none."""
    tried: int = 0
    """Attempts without a healthy step since."""
    returned: int = 0
    """Those among them that returned to an earlier state."""
    by_refusal: bool = False
    """Whether refused steps led to the last return, and not a loss that stayed high."""
    attempts: int = 0
    """Returns that a calm stretch has not given back yet."""
    cuts: int = 0
    """Cuts of the learning rate that are in force."""
    calm: int = 0
    """Healthy steps in a row."""
    trial: int = 0
    """How many unhealthy steps more show that the last return was no help; 0 once that is settled."""
    doubts: int = 0
    """Returns that were declined or taken back, less those a calm stretch has forgiven."""
    means: int = 0
    """Unhealthy steps of the episode under way that mean losses show and their own do not."""
    by_means: bool = False
    """Whether most of the steps that led to the last return were of this kind."""


@dataclass(frozen=True)
class TrainingRecovery:
    """Returns to earlier states, kept in memory and in checkpoints.

    Leaving a step out cures a bad batch. It does not cure weights or moments that are already damaged: those need an
    earlier state. `TrainingRecovery` counts unhealthy steps (refused ones, losses that are a `Setback`, mean losses
    that have `LostProgress`) and calls for a return when there are too many, at once when the weights themselves are
    not finite. The run then goes on from the earlier weights with the data that comes next, so the batches that did the
    damage are not fed again, and with a smaller learning rate. The cut compounds over attempts and is lifted step by
    step while the run stays healthy: the rate is the cause only now and then, and a run that learns at half its rate
    for good is harmed too. Attempts come back more slowly than the rate does, so that instability that returns with the
    rate leads to a deeper cut.

    Was it the weights? Whatever damages them moves them further than training does in as many steps, and a new data
    set, a harder task or a run of bad batches does not. So a return is declined if the weights had moved as usual when
    the unhealthy steps began, unless they are not finite or steps go on being refused. The first steps after a return
    show it, too: if the loss of the earlier weights is just as high, the weights were never to blame, and the return is
    taken back at the cost of those few steps. Either way the next return needs more patience. If steps are refused as
    before, the state was bad already, and an older one is tried.
    """

    every_steps: int = 20
    """How often a healthy state is copied in memory."""
    keep: int = 2
    """How many of these copies there are. Each takes the memory of the model and its optimizer state."""
    device_bytes: int | None = None
    """Copies stay on the GPU while all of them fit in so many bytes, and go to pinned host memory otherwise. `None`: a
    tenth of the GPU's memory."""
    patience_steps: int = 10
    """Unhealthy steps before a return, with fewer than five healthy ones in a row between them. A spike that heals
    sooner is left alone."""
    patience_refused: int = 5
    """… or refused steps in a row."""
    margin_steps: int = 5
    """How much older than the first unhealthy step a state must be: damage takes some steps to show."""
    attempts: int = 3
    """Returns before the run halts if its weights are not finite, and otherwise goes on without returns until a calm
    stretch has given one back: a loss that is high, and finite, is no proof that nothing can be learned any more."""
    lr_factor: float = 0.5
    """What the learning rate is multiplied by after a return, once for each attempt that is not given back yet. The
    schedule is left as it is."""
    cut_steps: int = 20
    """Healthy steps in a row after which one of these cuts is lifted."""
    calm_steps: int = 200
    """Healthy steps in a row that give one attempt back."""
    first: Literal["roll_back", "reset_moments"] = "roll_back"
    """What is tried first. `"reset_moments"` keeps finite weights and clears the optimizer's state, for a spike that
    has polluted Adam's moments."""
    repeat: bool = field(default=False, repr=False)
    """Whether a return goes back to an earlier moment and repeats the steps since: the place in the data, the random
    streams, the schedule and the step count return too. Needs batches that are drawn from `stabilizer.resume(loader)`,
    and a loader that can be taken up in the middle; elsewhere a return is to earlier weights."""

    def __post_init__(self) -> None:
        for name in ("every_steps", "keep", "patience_steps", "patience_refused", "cut_steps", "calm_steps"):
            value = getattr(self, name)
            require(isinstance(value, int) and value >= 1, f"`{name}` must be at least 1; got {value!r}.")
        require(self.margin_steps >= 0, f"`margin_steps` must not be negative; got {self.margin_steps}.")
        require(self.attempts >= 0, f"`attempts` must not be negative; got {self.attempts}.")
        require(
            0 < self.lr_factor <= 1, f"`lr_factor` must lie in (0, 1]; got {self.lr_factor}. A cut never raises the LR."
        )
        require(
            self.device_bytes is None or self.device_bytes >= 0,
            f"`device_bytes` must not be negative; got {self.device_bytes}. 0 keeps every copy in host memory.",
        )
        require(
            self.first in ("roll_back", "reset_moments"),
            f"`first` must be 'roll_back' or 'reset_moments'; got {self.first!r}.",
        )

    def init(self) -> RecoveryState:
        """Every attempt to come."""
        return RecoveryState()

    def update(
        self,
        state: RecoveryState,
        step: int,
        *,
        refused: bool = False,
        setback: bool = False,
        lost: bool = False,
        broken: bool = False,
    ) -> tuple[RecoveryState, Decision]:
        """Account for one step.

        Args:
            state: what the step before returned.
            step: its number.
            refused: the step was not applied.
            setback: its loss is a `Setback`.
            lost: the mean of the last losses is too high, as `LostProgress` judges it.
            broken: the weights themselves are not finite.
        """
        if not (refused or setback or lost or broken):
            return self._healthy(state)
        state = state._replace(
            unhealthy=state.unhealthy + 1,
            refused=state.refused + 1 if refused else 0,
            onset=state.onset if state.onset >= 0 else step if refused or setback else max(step - LATE_STEPS, 0),
            trial=max(state.trial - 1, 0),
            calm=0,
            means=state.means + (lost and not setback and not refused),
        )
        if state.returned and state.trial == 0 and not state.by_refusal and not broken:
            return self._take_back(state)
        if not (broken or self._is_due(state)):
            return state, self._decision("none", state)
        return self._go_back(state, broken, self._reason(state, broken))

    def _healthy(self, state: RecoveryState) -> tuple[RecoveryState, Decision]:
        calm = state.calm + 1
        if state.returned and state.by_means and calm < TRIAL_SETTLED_STEPS:
            state = state._replace(refused=0, trial=TRIAL_STEPS, calm=calm)
            return state, self._decision("none", state)
        if state.onset >= 0 and calm < SETTLED_STEPS:
            state = RecoveryState(
                unhealthy=state.unhealthy,
                onset=state.onset,
                attempts=state.attempts,
                cuts=state.cuts,
                calm=calm,
                doubts=state.doubts,
                means=state.means,
            )
            return state, self._decision("none", state)
        lifted, refilled = calm % self.cut_steps == 0, calm % self.calm_steps == 0
        state = RecoveryState(
            attempts=max(state.attempts - refilled, 0),
            cuts=max(state.cuts - lifted, 0),
            calm=calm,
            doubts=max(state.doubts - refilled, 0),
        )
        return state, self._decision("none", state)

    def _is_due(self, state: RecoveryState) -> bool:
        if state.tried:
            return state.trial == 0
        doubt = int(DOUBT_FACTOR**state.doubts)
        return state.unhealthy >= self.patience_steps * doubt or state.refused >= self.patience_refused * doubt

    def _go_back(self, state: RecoveryState, broken: bool, reason: str) -> tuple[RecoveryState, Decision]:
        if state.attempts >= self.attempts:
            # A halt needs proof. Refused steps do no harm: what is left to do about them is a matter of skips. A loss
            # that is high and finite may be that of other data, and the run may learn them.
            return state, self._decision("halt" if broken else "none", state, reason)
        resets = self.first == "reset_moments" and not state.tried and not broken
        before = state.onset - self.margin_steps
        # Steps that go on being refused lead nowhere, wherever the weights are.
        sure = broken or state.tried > 0 or (state.doubts > 0 and state.refused > 0)
        attempts = state.attempts + 1
        state = state._replace(
            attempts=attempts,
            cuts=attempts,
            tried=state.tried + 1,
            returned=state.returned + (not resets),
            by_refusal=broken or state.by_refusal or state.refused >= self.patience_refused,
            by_means=2 * state.means > state.unhealthy,
            means=0,
            trial=TRIAL_STEPS,
            unhealthy=0,
            refused=0,
        )
        decision = self._decision("reset_moments" if resets else "roll_back", state, reason, before)
        return state, replace(decision, only_if_moved=not sure)

    def is_exhausted(self, state: RecoveryState) -> bool:
        """Whether a return is called for and none is left."""
        return self._is_due(state) and state.attempts >= self.attempts

    def decline(self, state: RecoveryState) -> RecoveryState:
        """The state before a return that was called for and not made: the weights had not moved."""
        attempts = max(state.attempts - 1, 0)
        return RecoveryState(
            onset=state.onset, attempts=attempts, cuts=min(state.cuts, attempts), doubts=state.doubts + 1
        )

    def _take_back(self, state: RecoveryState) -> tuple[RecoveryState, Decision]:
        """The loss of the earlier weights is as high: it is the data."""
        state = self.decline(state)
        reason = "the loss of the earlier weights is equally high, so the data has changed and not the model"
        return state, self._decision("take_back", state, reason)

    def _reason(self, state: RecoveryState, broken: bool) -> str:
        if broken:
            return "the weights are not finite"
        if state.tried:
            return "the restored state is no better"
        if state.refused >= self.patience_refused:
            return f"{state.refused} consecutive steps were refused"
        return f"the loss was above its earlier level in {state.unhealthy} steps, and did not recover between them"

    def cut(self, state: RecoveryState) -> float:
        """What the learning rate is multiplied by."""
        return float(self.lr_factor**state.cuts)

    def _decision(self, action: Action, state: RecoveryState, reason: str = "", before: int | None = None) -> Decision:
        return Decision(action, reason, self.cut(state), before)
