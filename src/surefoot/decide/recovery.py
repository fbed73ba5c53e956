"""The response to anomalous steps: `Escalation` (skip, back off, halt) and `TrainingRecovery` (return to a state).

Every action has a budget that refills while the run is healthy. Both are pure: `update(state, ...)` accounts for one
step and returns the next state and a `Decision`.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from surefoot.core.settings import check_types
from surefoot.errors import require
from surefoot.types import Decision

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from surefoot.types import Action, StepRecord


class EscalationState(NamedTuple):
    """The used budgets, and the number of healthy steps."""

    skips: float = 0.0
    cuts: int = 0
    calm: int = 0


@dataclass(frozen=True)
class Escalation:
    """Budgets for the response to anomalous steps.

    A step that is not applied costs one skip. When the skips are used up, the learning rate is cut and the skips are
    full again; when the cuts are used up, the run halts. A stabilizer halts only if no step was applied meanwhile: a
    run that still applies steps is training, whatever was refused between them.

    Every healthy step shows that the weights are valid, so `refill_steps` of them restore one skip: occasional bad
    batches are skipped indefinitely, and only many refusals within a short time escalate. After `calm_steps`
    consecutive healthy steps the skips are full and one cut is lifted, so that an unstable phase does not slow the rest
    of the run.
    """

    skips: int = 10
    """Steps that may be skipped before the learning rate is cut."""
    cuts: int = 3
    """Learning-rate cuts before the run halts."""
    lr_factor: float = 0.5
    """The factor of one cut. Cuts compound."""
    refill_steps: int = 20
    """The number of healthy steps that restore one skip."""
    calm_steps: int = 200
    """The number of consecutive healthy steps after which skips are full and one cut is lifted."""

    def __post_init__(self) -> None:
        check_types(self)
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
        """Process one step and return the response to it."""
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
"""The number of consecutive healthy steps that end an unhealthy episode. A diverging run has some low losses, too."""
TRIAL_STEPS = 3
"""The number of consecutive unhealthy steps after a return that show that it did not help."""
RAISED_PATIENCE_STEPS = 3
"""The number of unhealthy steps before a return if they began soon after the learning rate was raised far above all
before: two independent facts."""
LATE_STEPS = 7
"""The delay of mean losses behind single ones: most losses of a block of `LostProgress` must be high."""
TRIAL_SETTLED_STEPS = 12
"""The number of consecutive healthy steps that confirm a return caused by mean losses, which take some steps to rise
again."""
TRIAL_MOST_STEPS = 20
"""The maximum for a return caused by single losses."""
BY_CHANCE = 0.005
"""The maximum probability that these healthy steps occur by chance, judged by how many losses before the return were
low: with batches of one row, some are low even if the model is wrong."""
DOUBT_FACTOR = 4
"""The factor for the patience after a return that was declined or had to be undone."""
SAME_LEVEL = 0.1
"""The share of the gradient norm of a step refused by `Explosion` from which the next one is as large. After a bad
batch it is smaller by more than `Explosion.factor`."""


BURST_STEPS, AFTER_BURST_STEPS = 3, 4
"""The minimum number of steps of a series of bad batches, and the number of steps after it that show its end."""
BURST_FALL = 2.0
"""The factor by which the loss falls, above its earlier level, from any step of the series to any step after it."""
STILL_FALLING = 0.8
"""The share of the loss two steps earlier below which it still falls quickly, as while other data is learned."""
USUAL_STEPS = 64
"""The number of steps before a problem whose median loss is the earlier level."""

_JUMPED = "the weights have moved much further than the learning rate and the gradients explain"
_BURST = "the loss fell in one step and stays above its earlier level: a series of bad batches has damaged the weights"


class RecoveryState(NamedTuple):
    """The state of the recovery. Counts are of steps."""

    unhealthy: int = 0
    """Unhealthy steps of the current episode."""
    refused: int = 0
    """Consecutive refused steps."""
    onset: int = -1
    """The first step of the current episode; -1 for none."""
    tried: int = 0
    """Attempts without a healthy step since."""
    returned: int = 0
    """Those among them that returned to an earlier state."""
    by_refusal: bool = False
    """Whether refused steps caused the last return, and not a loss that stayed high."""
    attempts: int = 0
    """Returns that healthy steps have not restored yet."""
    cuts: int = 0
    """The active cuts of the learning rate."""
    calm: int = 0
    """Consecutive healthy steps."""
    trial: int = 0
    """The number of further unhealthy steps that show that the last return did not help; 0 once that is decided."""
    doubts: int = 0
    """Returns that were declined or undone, less those forgiven after healthy steps."""
    means: int = 0
    """Unhealthy steps of the current episode that only the mean losses show."""
    between: int = 0
    """Healthy steps between the unhealthy ones of the current episode, since the last return."""
    confirm: int = 1
    """The number of consecutive healthy steps that confirm the last return."""


def _counted(state: RecoveryState, began: int, refused: bool, means: bool) -> RecoveryState:
    """The state after one more unhealthy step; `means` is whether only the mean losses show it."""
    return state._replace(
        unhealthy=state.unhealthy + 1,
        refused=state.refused + 1 if refused else 0,
        onset=state.onset if state.onset >= 0 else began,
        trial=max(state.trial - 1, 0),
        calm=0,
        means=state.means + means,
    )


@dataclass(frozen=True)
class TrainingRecovery:
    """Returns to earlier states, kept in memory and in checkpoints.

    Skipping a step cures a bad batch. It does not cure weights or moments that are already damaged: those need an
    earlier state. `TrainingRecovery` counts unhealthy steps (refused ones, losses that are a `Setback`, mean losses
    with `LostProgress`) and requests a return when there are too many, or immediately when the weights themselves are
    not finite. The run then continues from the earlier weights with the next data, so the harmful batches are not used
    again, and with a smaller learning rate. The cut compounds over attempts and is lifted step by step while the run
    stays healthy: the rate is only sometimes the cause, and a permanently halved rate harms a run too. Attempts are
    restored more slowly than the rate, so that instability that returns with the rate leads to a deeper cut.

    Damaged weights have moved further than training moves them in as many steps; with a new data set, a harder task or
    several bad batches they have not. So a return is declined if the weights had moved as usual when the unhealthy
    steps began, unless they are not finite or steps are still refused. For the same reason no patience is needed if the
    gradients of two consecutive steps are far above all earlier ones: the second step is applied, and if the weights
    had moved unusually far before the first, the run returns. Nor is a loss needed if the weights moved much further
    between two copies than learning rate and gradients explain.

    A learning rate far above all earlier ones moves the weights further, too: if unhealthy steps begin within
    `margin_steps` after it, three of them suffice. The run returns to the weights before the raise, and the rate is
    limited to the one before it, until it has come down or the limit is lifted step by step (`decide/raised_rate.py`).

    The first steps after a return show the cause, too: if the loss of the earlier weights is just as high, and no
    raised learning rate has damaged them again, the weights were not the cause. The return is undone at the cost of
    those few steps, and the losses from then on are the level that later ones are compared with. In both cases the next
    return needs more patience. If steps are still refused, the state was already bad, and an older one is tried.
    """

    every_steps: int = 20
    """The number of steps between two copies of a healthy state in memory."""
    keep: int = 2
    """The number of these copies. Each takes the memory of the model and its optimizer state."""
    device_bytes: int | None = None
    """Copies stay on the GPU if all of them fit in this many bytes, and otherwise go to pinned host memory. `None`: a
    tenth of the GPU's memory."""
    patience_steps: int = 10
    """The number of unhealthy steps before a return, with fewer than five consecutive healthy ones between them. A
    spike that recovers sooner causes no return."""
    patience_refused: int = 5
    """… or of consecutive refused steps."""
    margin_steps: int = 5
    """The minimum age of a state relative to the first unhealthy step: damage takes some steps to show."""
    attempts: int = 3
    """The number of returns after which the run halts if its weights are not finite, and otherwise continues without
    returns until healthy steps have restored one: a high, finite loss does not prove that nothing can be learned any
    more."""
    lr_factor: float = 0.5
    """The factor for the learning rate after a return, once for each attempt that is not restored yet. The schedule is
    not changed."""
    cut_steps: int = 20
    """The number of consecutive healthy steps after which one of these cuts is lifted."""
    calm_steps: int = 200
    """The number of consecutive healthy steps that restore one attempt."""
    first: Literal["roll_back", "reset_moments"] = "roll_back"
    """The first response. `"reset_moments"` keeps finite weights and clears the optimizer's state, for a spike that has
    polluted Adam's moments."""
    repeat: bool = field(default=False, repr=False)
    """Whether a return goes to an earlier moment and repeats the steps since: the data position, the random streams,
    the schedule and the step count return too. Needs batches that are drawn from `stabilizer.resume(loader)`, and a
    loader that can start in the middle; otherwise only the weights return."""

    def __post_init__(self) -> None:
        check_types(self)
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
        """All attempts are available."""
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
        level: bool = False,
        jumped_after: int | None = None,
        burst_through: int | None = None,
        raised_at: int | None = None,
    ) -> tuple[RecoveryState, Decision]:
        """Process one step.

        Args:
            state: the result of the previous step.
            step: its number.
            refused: whether the step was not applied.
            setback: whether its loss is a `Setback`.
            lost: whether the mean of the last losses is too high, according to `LostProgress`.
            broken: whether the weights themselves are not finite.
            level: whether it was applied although its gradient is as large as that of the step refused before it.
            jumped_after: the step after which the weights moved further than learning rate and gradients explain;
                `None` if they did not.
            burst_through: the last step of a series of bad batches that ended; `None` if there was none.
            raised_at: the first step at a learning rate far above all before, if the weights since are in doubt.
                It is the cause if the problem began after it.
        """
        if jumped_after is not None and not broken:
            state = state._replace(onset=jumped_after + self.margin_steps, refused=self.patience_refused, calm=0)
            return self._go_back(state, False, _JUMPED, raised_at, sure=True)
        if not (refused or setback or lost or broken or level):
            return self._healthy(state)
        began = step if refused or setback or raised_at is not None else max(step - LATE_STEPS, 0)
        state = _counted(state, began, refused, means=lost and not setback and not refused)
        if raised_at is not None and state.onset <= raised_at:
            raised_at = None  # a loss is that of the weights before the step: the first raised step came later
        if state.returned and (state.trial == 0 or level) and not state.by_refusal and not broken:
            return self._take_back(state)
        if burst_through is not None and not state.tried and not broken:
            state, decision = self._go_back(state, False, _BURST, raised_at, sure=True)
            return state, replace(decision, through=burst_through)
        soon = self._is_soon(state, raised_at)
        if not (broken or self._is_due(state, soon) or (level and not state.doubts)):
            return state, self._decision("none", state)
        return self._go_back(state, broken, self._reason(state, broken, level), raised_at)

    def _healthy(self, state: RecoveryState) -> tuple[RecoveryState, Decision]:
        calm = state.calm + 1
        if state.returned and calm < state.confirm:
            state = state._replace(refused=0, calm=calm)
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
                between=0 if state.returned else state.between + 1,
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

    def _is_soon(self, state: RecoveryState, raised_at: int | None) -> bool:
        """Whether the problem began within as many steps after a raise of the learning rate as damage takes to show.

        Later, a raise proves no more than any other rate: the problem needs the usual patience and evidence.
        """
        return raised_at is not None and state.onset <= raised_at + max(self.margin_steps, 1)

    def _is_due(self, state: RecoveryState, soon_after_raise: bool = False) -> bool:
        if state.tried:
            return state.trial == 0
        doubt = int(DOUBT_FACTOR**state.doubts)
        patience = min(self.patience_steps, RAISED_PATIENCE_STEPS) if soon_after_raise else self.patience_steps
        return state.unhealthy >= patience * doubt or state.refused >= self.patience_refused * doubt

    def _go_back(
        self, state: RecoveryState, broken: bool, reason: str, raised_at: int | None, sure: bool = False
    ) -> tuple[RecoveryState, Decision]:
        if state.attempts >= self.attempts:
            # A halt needs proof. Refused steps do no harm: skipping handles them. A high, finite loss may come from
            # other data, which the run may learn.
            return state, self._decision("halt" if broken else "none", state, reason)
        resets = self.first == "reset_moments" and not state.tried and not broken
        before, raised = state.onset - self.margin_steps, raised_at is not None
        if raised_at is not None:  # no step before it contributed to the damage
            before = raised_at if raised_at <= state.onset else min(before, raised_at)
        # Continued refusals need a return wherever the weights are. A raised rate moves them further than usual.
        sure = (
            sure
            or broken
            or self._is_soon(state, raised_at)
            or state.tried > 0
            or (state.doubts > 0 and state.refused > 0)
        )
        attempts = state.attempts + 1
        by_refusal = broken or state.by_refusal or state.refused >= self.patience_refused
        state = state._replace(
            attempts=attempts,
            cuts=state.cuts if raised else attempts,  # the rate is limited to the one before
            tried=state.tried + 1,
            returned=state.returned + (not resets),
            by_refusal=by_refusal,
            confirm=1 if by_refusal else _steps_to_confirm(state),
            means=0,
            between=0,
            trial=TRIAL_STEPS,
            unhealthy=0,
            refused=0,
        )
        decision = self._decision("reset_moments" if resets else "roll_back", state, reason, before)
        return state, replace(decision, only_if_moved=not sure, limits_rate=raised and not resets)

    def is_exhausted(self, state: RecoveryState) -> bool:
        """Whether a return is needed and none is left."""
        return self._is_due(state) and state.attempts >= self.attempts

    def decline(self, state: RecoveryState) -> RecoveryState:
        """The state before a requested return that was not made: the weights had not moved."""
        attempts = max(state.attempts - 1, 0)
        return RecoveryState(
            onset=state.onset, attempts=attempts, cuts=min(state.cuts, attempts), doubts=state.doubts + 1
        )

    def keep_return(self, state: RecoveryState) -> RecoveryState:
        """The state if a return that was to be undone stays: further unhealthy steps lead to another one."""
        attempts, doubts = state.attempts + 1, max(state.doubts - 1, 0)
        return RecoveryState(TRIAL_STEPS, onset=state.onset, attempts=attempts, cuts=attempts, doubts=doubts)

    def _take_back(self, state: RecoveryState) -> tuple[RecoveryState, Decision]:
        """Undo a return: the loss of the earlier weights is as high, so the data is the cause."""
        state = self.decline(state)
        reason = "the loss of the earlier weights is equally high, so the data has changed and not the model"
        return state, self._decision("take_back", state, reason)

    def _reason(self, state: RecoveryState, broken: bool, level: bool) -> str:
        if broken:
            return "the weights are not finite"
        if state.tried:
            return "the restored state is no better"
        if level:
            return "the gradients stayed far above all earlier ones, and the weights had moved further than usual"
        if state.refused >= self.patience_refused:
            return f"{state.refused} consecutive steps were refused"
        return f"the loss was above its earlier level in {state.unhealthy} steps, and did not recover between them"

    def cut(self, state: RecoveryState) -> float:
        """The factor for the learning rate."""
        return float(self.lr_factor**state.cuts)

    def _decision(self, action: Action, state: RecoveryState, reason: str = "", before: int | None = None) -> Decision:
        return Decision(action, reason, self.cut(state), before)


def _steps_to_confirm(state: RecoveryState) -> int:
    """The number of consecutive healthy steps that confirm a return after this episode."""
    if 2 * state.means > state.unhealthy:
        return TRIAL_SETTLED_STEPS
    low = state.between + state.means  # the steps whose single losses were not high
    chance = (low + 1) / (state.between + state.unhealthy + 2)
    return min(math.ceil(math.log(BY_CHANCE) / math.log(chance)), TRIAL_MOST_STEPS)


def burst_end(records: Sequence[StepRecord], onset: int | None, agreed: Callable[[bool], bool]) -> int | None:
    """The last step of a series of bad batches that began at `onset`, if the records show that it has just ended.

    While a model learns other data, its loss falls little by little. If it falls at once and then stays, still above
    its level before `onset`, the data is as before, and the weights are not. Each loss after the series must be above
    three quarters of those before it: where losses vary a hundredfold, several high ones in a row occur by chance.
    `agreed` returns whether a flag is set on any rank. All ranks call it at the same steps: they share the onset.
    """
    now = records[-1].signals.step
    last = now - AFTER_BURST_STEPS
    if onset is None or last - onset + 1 < BURST_STEPS:
        return None
    return last if agreed(_has_fallen(records, onset, last)) else None


def was_bad_batch(records: Sequence[StepRecord], onset: int | None) -> bool:
    """Whether the problem that began at `onset` was caused by the batch of that step alone, as the losses since show.

    The first loss on other data is like the next ones. That of a bad batch is far above those of the following batches,
    which are high because the step has damaged the weights.
    """
    return onset is not None and _has_fallen(records, onset, onset)


def _has_fallen(records: Sequence[StepRecord], onset: int, last: int) -> bool:
    """Whether the loss has fallen at once after `last`, and stays above its level before `onset`."""
    losses = {each.signals.step: each.signals.loss for each in records if each.signals.step >= onset - USUAL_STEPS}
    known = {step: float(loss) for step, loss in losses.items() if loss is not None and math.isfinite(loss)}
    usual = sorted(loss for step, loss in known.items() if step < onset)
    during = [loss for step, loss in known.items() if onset <= step <= last]
    after = [loss for step, loss in known.items() if step > last]
    least = min(BURST_STEPS, last - onset + 1)
    if len(usual) < USUAL_STEPS // 2 or len(during) < least or len(after) < AFTER_BURST_STEPS:
        return False
    level, upper_quartile, half = usual[len(usual) // 2], usual[3 * len(usual) // 4], len(after) // 2
    if usual[len(usual) // 4] == upper_quartile:
        return False  # such as a loss of exactly 0 before the first reward: it shows no usual size of losses
    fell = min(during) - level > BURST_FALL * (max(after) - level) and min(after) > upper_quartile
    before, now = (statistics.median(part) - level for part in (after[:half], after[half:]))
    return fell and now > STILL_FALLING ** (half / 2) * before > 0


def is_new_level(before: StepRecord | None, now: StepRecord, agreed: Callable[[bool], bool]) -> bool:
    """Whether a step was applied with a gradient about as large as that of the step refused `before` it.

    `agreed` returns whether a flag is set on any rank. All ranks call it at the same steps: they share the reasons.
    """
    if before is None or now.skipped or not before.skipped or "explosion" not in before.reasons:
        return False
    norm, refused = now.signals.grad_norm, before.signals.grad_norm
    return agreed(norm is not None and refused is not None and bool(norm > SAME_LEVEL * refused))
