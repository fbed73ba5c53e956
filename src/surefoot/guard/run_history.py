"""The history of a run: steps, alarms and incidents, and the decision how to respond to each step.

On a GPU the numbers of a step arrive a fixed number of steps later, so that a run decides the same way every time.
Whether a step is applied was decided on the device long before. Three parts:

- `RunHistory` keeps records, incidents and counts;
- `Alarms` runs the detectors that look back over many steps, and those for the user's own signals;
- `Budgets` decides about refused steps: skip, cut the learning rate, return to earlier weights, halt.
"""

from __future__ import annotations

import copy
import logging
import math
from collections import deque
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

from surefoot.core.state_tree import pack, settings_of, unpack
from surefoot.decide.raised_rate import RateState, RateWatch
from surefoot.decide.recovery import burst_end, is_new_level
from surefoot.decide.repeat import RepeatPlanner, RepeatState
from surefoot.detect.combine import Combined, sustained, tolerated
from surefoot.detect.step_rules import Spike
from surefoot.guard.changed_settings import log_changed_parts
from surefoot.guard.refusal import RefusalExplainer
from surefoot.guard.step_decision import BROKEN_SETTING
from surefoot.types import Action, Decision, Incident, Severity, StepRecord, format_number

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from surefoot.core.state_tree import Packed
    from surefoot.decide.recovery import Escalation, TrainingRecovery
    from surefoot.detect.checker import StabilityChecker
    from surefoot.guard.refusal import Evidence
    from surefoot.types import Detector, Signals, Verdict

    Note: TypeAlias = Callable[..., Incident]

log = logging.getLogger("surefoot")

HISTORY_STEPS = 1_000
LAYERS_KEPT = 100
"""The number of records that keep their per-layer statistics, which are most of the data of a large model."""
INCIDENTS_KEPT = 200
RECENT_STEPS = 50
RECENT_NORMS = 128
"""The number of gradient norms whose median a refused one is compared with in messages."""
REASONS_KEPT = 5
QUIET_STEPS = 10
"""The number of steps without a refusal or a setback before the run counts as quiet."""
SETBACKS_COUNTED = 3
"""The number of consecutive setbacks from which the run is not quiet: a single one is noise."""
LOGGED_INCIDENTS = 20
"""The number of incidents of one kind that are logged individually; later ones are only counted."""

_USED_UP = (
    "the loss is above its earlier level, and all returns are used up: the run continues without returns until "
    "`TrainingRecovery.calm_steps` healthy steps restore one"
)
_NEW_LEVEL = "the gradient of the next step is as large: a new level, and not a single bad batch"
_MAY_BE_LEVELS = frozenset({"explosion", "spike"})
"""Rules that refuse the first step of a new level, too: one step does not distinguish it from a bad batch."""
_RETURNS = ("roll_back", "reset_moments", "take_back")
"""Actions after which the steps taken since are ignored."""


class AlarmsState(TypedDict):
    """The stored state of `Alarms`."""

    look_back: Packed
    """The state of the detectors that look back over many steps."""
    own: dict[str, Packed]
    """The states of the detectors of the user's own signals, by signal."""
    active: list[str]
    """Kind and severity of each alarm that is raised."""


class _RepeatBudget(TypedDict, total=False):
    repeat: Packed
    """The state of the repeats, if the run repeats the steps that a return undoes."""


class BudgetsState(_RepeatBudget):
    """The stored state of `Budgets`."""

    escalation: Packed
    recovery: Packed
    rates: Packed
    """The learning rates so far."""
    instability: list[list[int | str]]
    """Step and sentence of the last reasons why the run was not quiet."""


class RunHistoryState(AlarmsState, BudgetsState):
    """The stored state of a `RunHistory` and of its two parts."""

    settings: dict[str, str]
    """The settings of the parts."""
    counts: dict[str, int]
    """The number of steps, and of skipped, clipped and other steps."""
    by_kind: dict[str, int]
    """The number of incidents of each kind."""
    recent_norms: list[float]
    """The gradient norms of the last applied steps."""


class Alarms:
    """Detectors that look back over many steps; they raise incidents and refuse nothing."""

    def __init__(self, checker: StabilityChecker) -> None:
        self.look_back = tolerated(Combined(checker.look_back, "any")) if checker.look_back else None
        self._look_back_state = self.look_back.init() if self.look_back else ()
        self._own: dict[str, tuple[Detector, Any]] = {}
        self._active: set[str] = set()

    def ahead(self) -> Alarms:
        """A copy with its own states."""
        ahead = copy.copy(self)
        ahead._own, ahead._active = dict(self._own), set(self._active)
        ahead._look_back_state = copy.deepcopy(self._look_back_state)
        return ahead

    def update(self, record: StepRecord, note: Note) -> None:
        """Process one step; `note` records an incident.

        A step that is not applied, or would not have been, does not enter a baseline.
        """
        self._watch_own_signals(record.signals, note)
        if not record.skipped and not record.reasons:
            self._update_look_back(record.signals, note)

    def applied_nonetheless(self, record: StepRecord, explain: Callable[[], tuple[str, Evidence]], note: Note) -> None:
        """When steps are only watched, one that would be refused is applied: record an incident when that starts."""
        kind = record.reasons[0] if record.reasons else "refused"
        if record.skipped or not record.reasons:
            self._active -= {each for each in self._active if each.endswith("/applied")}
        elif f"{kind}/applied" not in self._active:
            self._active.add(f"{kind}/applied")
            summary, evidence = explain()
            note(record.signals, kind, "error", summary, evidence=evidence)

    def _update_look_back(self, signals: Signals, note: Note) -> None:
        if self.look_back is None:
            return
        self._look_back_state, verdict = self.look_back.update(self._look_back_state, signals)
        for part in verdict.parts:
            self._alarm(part.detector, part, signals, note)

    def _watch_own_signals(self, signals: Signals, note: Note) -> None:
        """Check the user's own signals like the built-in ones: NaN immediately, a spike if it persists."""
        for name, value in signals.extra.items():
            detector, state = self._own.get(name) or _fresh(name)
            state, verdict = detector.update(state, signals)
            self._own[name] = (detector, state)
            if not math.isfinite(value):
                verdict = replace(verdict, anomalous=True, summary=f"{name} is {value}")
            elif verdict.anomalous:
                verdict = replace(verdict, summary=f"{name} is {value:.4g}, far above its recent values")
            self._alarm(f"signal.{name}", verdict, signals, note)

    def _alarm(self, kind: str, verdict: Verdict, signals: Signals, note: Note) -> None:
        """Record an incident when an alarm starts, and when an info becomes a warning, but not while it lasts."""
        if not verdict.anomalous:
            if self._active:
                self._active -= {f"{kind}/{severity}" for severity in ("info", "warning", "error")}
        elif (known := f"{kind}/{verdict.severity}") not in self._active:
            self._active.add(known)
            note(signals, kind, verdict.severity, verdict.summary, evidence=dict(verdict.evidence))

    def state_dict(self) -> AlarmsState:
        """The states of the detectors, and the active alarms."""
        return {
            "look_back": pack(self._look_back_state),
            "own": {name: pack(state) for name, (_, state) in self._own.items()},
            "active": sorted(self._active),
        }

    def load_state_dict(self, state: AlarmsState, same_look_back: bool) -> None:
        """Continue from a saved state; detectors whose settings have changed start again."""
        if self.look_back and same_look_back:
            self._look_back_state = unpack(self.look_back.init(), state["look_back"])
        self._own = {}
        for name, packed in state["own"].items():
            detector, fresh = _fresh(name)
            self._own[name] = (detector, unpack(fresh, packed))
        self._active = set(state["active"])


class Budgets:
    """Decides how to respond to refused steps and setbacks, within budgets."""

    def __init__(
        self,
        escalation: Escalation | None,
        recovery: TrainingRecovery | None,
        scale_floor: float | None,
        weights_broken: Callable[[], bool],
        agreed: Callable[[bool], bool],
        alone: bool = True,
    ) -> None:
        """Start with full budgets.

        Args:
            escalation: skip, then cut the learning rate, then halt.
            recovery: return to earlier weights.
            scale_floor: the lowest loss scale; an overflow there is a refused step.
            weights_broken: whether a parameter is not finite on this rank.
            agreed: returns whether a flag is set on any rank.
            alone: whether there is one rank only, which may suspect a step without asking the others.
        """
        self.escalation, self.recovery, self._scale_floor = escalation, recovery, scale_floor
        self._escalation_state = escalation.init() if escalation else None
        self._recovery_state = recovery.init() if recovery else None
        self.repeats, self.rates = RepeatPlanner(recovery), RateWatch(recovery)
        self.weights_broken, self.agreed, self._alone = weights_broken, agreed, alone
        self.jumped_after: int | None = None
        """The step after which the weights moved as training does not explain; `None` if that was responded to."""
        self._reasons: deque[tuple[int, str]] = deque(maxlen=REASONS_KEPT)

    def ahead(self) -> Budgets:
        """A copy that does not communicate with other ranks: it may be used on one rank only."""
        ahead = copy.copy(self)
        ahead._reasons, ahead.agreed = self._reasons.copy(), lambda flag: flag
        ahead.repeats, ahead.rates = copy.copy(self.repeats), copy.copy(self.rates)
        return ahead

    def is_stuck(self, record: StepRecord) -> bool:
        """Whether gradients overflow at the lowest loss scale."""
        floor = self._scale_floor
        return record.overflow and floor is not None and record.signals.loss_scale <= floor  # type: ignore[return-value]

    def refuses(self, record: StepRecord) -> bool:
        """Whether the step was refused, and not only skipped because of the loss scale."""
        return record.skipped and (not record.overflow or self.is_stuck(record))

    def escalate(self, record: StepRecord, refused: bool, summary: str) -> Decision:
        """The response to a step; `summary` is the reason why it was refused."""
        if self.escalation is None:
            decision = Decision("skip" if refused else "none", summary)
        else:
            self._escalation_state, decision = self.escalation.update(self._escalation_state, refused, summary)  # type: ignore[arg-type]
        if refused:
            step = record.signals.step
            self._reasons.append((step, f"step {step} was refused: {summary}"))
        return decision

    def recover(self, history: deque[StepRecord], refused: bool, decision: Decision) -> Decision:
        """Update the recovery with the last step of the history; its decision takes precedence over skipping."""
        if self.recovery is None:
            return decision
        record, before = history[-1], history[-2] if len(history) > 1 else None
        assert self._recovery_state is not None
        step, setback, lost = record.signals.step, "setback" in record.notices, "lost_progress" in record.notices
        if record.reasons == (BROKEN_SETTING,):  # earlier weights would not help
            return replace(decision, lr_factor=decision.lr_factor * self.recovery.cut(self._recovery_state))
        # Every rank gets here with the same flags, so every rank takes part.
        broken = refused and "nonfinite" in record.reasons and self.agreed(self.weights_broken())
        level, (jump, self.jumped_after) = is_new_level(before, record, self.agreed), (self.jumped_after, None)
        unhealthy = refused or setback or lost or broken or level or jump is not None
        self._recovery_state, advice = self.recovery.update(
            self._recovery_state,
            step,
            refused=refused,
            setback=setback,
            lost=lost,
            broken=broken,
            level=level,
            jumped_after=jump,
            burst_through=burst_end(history, self.onset, self.agreed) if setback else None,
            raised_at=self._raised_at(step) if unhealthy else None,
        )
        after = self._recovery_state
        self.rates.after_step(step, after.onset < 0, after.calm, after.attempts < self.recovery.attempts)
        if self.repeats.state is not None:
            suspicion = self.repeats.suspicion(history, refused, self._alone)
            advice = self.repeats.advise(step, unhealthy, advice, suspicion)
        if (setback or lost) and self._recovery_state.unhealthy >= SETBACKS_COUNTED:
            loss = format_number(record.signals.loss)
            self._reasons.append((step, f"the loss at step {step} is {loss}, so much of the progress is lost"))
        decision = replace(decision, lr_factor=decision.lr_factor * advice.lr_factor)
        if advice.action == "none" or (advice.is_test and decision.action not in ("none", "skip")):
            return decision
        if advice.action != "halt" and not advice.is_test and self._escalation_state is not None:
            self._escalation_state = self._escalation_state._replace(skips=0.0)
        return replace(advice, lr_factor=decision.lr_factor)

    def _raised_at(self, step: int) -> int | None:
        """The first step at a raised learning rate, if the weights since are in doubt on all ranks.

        With several ranks it is the step that all of them know: shortly before the problem.
        """
        raised_at = self.rates.raised_at
        if self.agreed(raised_at is None) or raised_at is None or self._alone:
            return raised_at
        margin = self.recovery.margin_steps if self.recovery is not None else 0
        return (step if self.onset is None else self.onset) - margin

    def decline(self, decision: Decision) -> None:
        """The return that was just decided, or the undoing of one, was not carried out."""
        assert self.recovery is not None
        assert self._recovery_state is not None
        decline = self.recovery.keep_return if decision.action == "take_back" else self.recovery.decline
        self._recovery_state = decline(self._recovery_state)

    @property
    def onset(self) -> int | None:
        """The step at which the current problem began; `None` if the run is healthy."""
        return None if self._recovery_state is None or self._recovery_state.onset < 0 else self._recovery_state.onset

    @property
    def out_of_returns(self) -> bool:
        """Whether a return is needed and none is left."""
        return self.recovery is not None and self.recovery.is_exhausted(self._recovery_state)  # type: ignore[arg-type]

    @property
    def returns_tried(self) -> int:
        """The number of states returned to since the last healthy step, including the one now decided."""
        return 0 if self._recovery_state is None else self._recovery_state.returned

    def instability(self, since_step: int) -> tuple[str, ...]:
        """The reasons why steps after `since_step` were not quiet; empty if they were."""
        return tuple(reason for step, reason in self._reasons if step > since_step)

    def state_dict(self) -> BudgetsState:
        """The remaining budgets."""
        state: BudgetsState = {
            "escalation": pack(self._escalation_state),
            "recovery": pack(self._recovery_state),
            "rates": pack(self.rates.state),
            "instability": [list(reason) for reason in self._reasons],
        }
        if self.repeats.state is not None:
            state["repeat"] = pack(self.repeats.state)
        return state

    def load_state_dict(self, state: BudgetsState, same_escalation: bool, same_recovery: bool) -> None:
        """Continue from a saved state; budgets with changed settings start full."""
        if self.escalation and same_escalation:
            self._escalation_state = unpack(self.escalation.init(), state["escalation"])
        if self.recovery and same_recovery:
            self._recovery_state = unpack(self.recovery.init(), state["recovery"])
        self.rates.state = unpack(RateState(), state["rates"])
        if self.repeats.state is not None and "repeat" in state:
            self.repeats.state = unpack(RepeatState(), state["repeat"])
        self._reasons = deque(((int(step), str(reason)) for step, reason in state["instability"]), maxlen=REASONS_KEPT)


class RunHistory:
    """Steps, incidents and counts of one run."""

    def __init__(
        self,
        checker: StabilityChecker,
        budgets: Budgets,
        first_of: Callable[[Any], str],
        on_event: Callable[[Incident], None] | None = None,
        *,
        announce: bool = True,
    ) -> None:
        """Start an empty history.

        Args:
            checker: the detectors that look back over many steps.
            budgets: decide how to respond to a step.
            first_of: returns the parameter, among several, whose gradient was computed first.
            on_event: called with each incident.
            announce: whether each incident is logged as a warning.
        """
        self.alarms, self.budgets = Alarms(checker), budgets
        self._refusals = RefusalExplainer(checker, first_of, budgets.weights_broken)
        self.history: deque[StepRecord] = deque(maxlen=HISTORY_STEPS)
        self._recent_norms: deque[float] = deque(maxlen=RECENT_NORMS)
        self.incidents: deque[Incident] = deque(maxlen=INCIDENTS_KEPT)
        self.counts: dict[str, int] = {
            "steps": 0,
            "applied": 0,
            "skipped": 0,
            "clipped": 0,
            "overflows": 0,
            "alarms": 0,
        }
        self.by_kind: dict[str, int] = {}
        self.on_event = on_event
        """Called with each incident."""
        self._logs = announce
        self._unsettled: Incident | None = None
        """A refused step that may be the first of a new level: it is reported when the next one shows it."""

    def ahead(
        self,
        records: Iterable[StepRecord],
        stale_before: float,
        on_event: Callable[[Incident], None] | None = None,
    ) -> RunHistory:
        """A copy that includes steps which have not been processed yet, for reading.

        The copy logs nothing, and calls `on_event` with each new incident. This history does not change: the responses
        to the steps are carried out in their turn, whether or not they were read before. Steps before `stale_before`
        are only counted, and so are those after a step that requires a return.
        """
        ahead = copy.copy(self)
        ahead.history, ahead.incidents = self.history.copy(), self.incidents.copy()
        ahead._recent_norms = self._recent_norms.copy()
        ahead.counts, ahead.by_kind = dict(self.counts), dict(self.by_kind)
        ahead.alarms, ahead.budgets = self.alarms.ahead(), self.budgets.ahead()
        ahead.on_event, ahead._logs = on_event, False
        for record in records:
            if record.signals.step < stale_before:
                ahead.count(record)
            elif ahead.account(record).action in _RETURNS:
                stale_before = math.inf
        return ahead

    def account(self, record: StepRecord) -> Decision:
        """Process one step; returns the decision for the following ones."""
        self.count(record)
        self.settle(record)
        self.alarms.update(record, self.note)
        refused, is_stuck = self.budgets.refuses(record), self.budgets.is_stuck(record)
        is_first = "nonfinite" not in self.by_kind
        explain = partial(self._refusals.explain, record, self._recent_norms, is_stuck=is_stuck, is_first=is_first)
        summary, evidence = explain() if refused else ("", {})
        decision = self.budgets.escalate(record, refused, summary)
        if decision.action == "halt" and _was_any_applied(self.history, self.budgets.escalation):
            decision = replace(decision, action="skip")
        if refused:
            kind = record.reasons[0] if record.reasons else "refused"
            kind = "precision.scaler-stuck" if is_stuck else kind
            self.note(
                record.signals, kind, "error", summary, decision.action, evidence,
                unsettled=decision.action == "skip" and self._may_be_level(record),
            )  # fmt: skip
        else:
            self.alarms.applied_nonetheless(record, explain, self.note)
        decision = self.budgets.recover(self.history, refused, decision)
        if decision.action == "none" and self.budgets.out_of_returns:
            self.warn_once(record.signals, "recovery.used-up", _USED_UP)
        return decision

    def _may_be_level(self, record: StepRecord) -> bool:
        """Whether a refused step may be the first of a new level.

        Weights that were damaged before have a new level, too. Only the recovery knows how far they have moved, and
        raises an alarm of its own.
        """
        is_finite = bool(record.reasons) and _MAY_BE_LEVELS.issuperset(record.reasons)
        return is_finite and self.budgets.recovery is not None

    def count(self, record: StepRecord) -> None:
        """Add one step to the history and the counts, without a decision."""
        self._remember(record)
        self.counts["steps"] += 1
        self.counts["skipped" if record.skipped else "applied"] += 1
        self.counts["overflows"] += record.overflow
        self.counts["clipped"] += not record.skipped and bool(record.signals.clip_factor < 1.0)

    def _remember(self, record: StepRecord) -> None:
        """Append to the history; older records keep their numbers and lose their layers."""
        self.history.append(record)
        if not record.skipped and record.signals.grad_norm:
            self._recent_norms.append(float(record.signals.grad_norm))
        if len(self.history) > LAYERS_KEPT:
            old = self.history[-LAYERS_KEPT - 1]
            self.history[-LAYERS_KEPT - 1] = replace(old, signals=replace(old.signals, layers=None))

    def note(
        self,
        signals: Signals,
        kind: str,
        severity: Severity,
        summary: str,
        action: Action = "none",
        evidence: Any = None,
        *,
        unsettled: bool = False,
    ) -> Incident:
        """Record an incident, and report it. If it is `unsettled`, the next step is awaited first."""
        self.settle()
        incident = Incident(signals.step, kind, severity, summary, action, evidence or {}, signals)
        self.incidents.append(incident)
        self.by_kind[kind] = self.by_kind.get(kind, 0) + 1
        self.counts["alarms"] += severity != "info"
        if unsettled:
            self._unsettled = incident
        else:
            self._report(incident)
        return incident

    def _report(self, incident: Incident) -> None:
        """Call `on_event`, and log a warning."""
        if self.on_event is not None:
            self.on_event(incident)
        kind, seen = incident.kind, self.by_kind[incident.kind]
        if self._logs and incident.severity != "info" and seen <= LOGGED_INCIDENTS:
            last = f" (later incidents of kind {kind!r} are counted, not logged)" if seen == LOGGED_INCIDENTS else ""
            log.warning("surefoot: %s%s", incident, last)

    def settle(self, following: StepRecord | None = None) -> None:
        """Report a refused step that may be the first of a new level, given the following one, if it is known.

        A new level is no alarm: that the step was skipped is recorded as an info.
        """
        incident, self._unsettled = self._unsettled, None
        if incident is None:
            return
        if following is not None and _is_as_large(incident, following):
            summary = f"{incident.summary}; {_NEW_LEVEL}"
            level = replace(incident, severity="info", summary=summary)
            self.incidents = deque((level if each is incident else each for each in self.incidents), INCIDENTS_KEPT)
            self.counts["alarms"] -= 1
            incident = level
        self._report(incident)

    def warn_once(self, signals: Signals, kind: str, summary: str) -> None:
        """Record a warning, the first time only."""
        if kind not in self.by_kind:
            self.note(signals, kind, "warning", summary)

    @property
    def healthy(self) -> bool:
        """Whether the last step was neither refused nor a setback."""
        return self.onset is None

    @property
    def onset(self) -> int | None:
        """The step at which the current problem began; `None` if the run is healthy."""
        return self.budgets.onset

    def typical(self, name: str, first: int, end: int) -> float:
        """Median of a signal over the steps from `first` up to `end` that were applied; 0 if there were none.

        The median is used because damaged weights have large gradients, a few of which must not count as usual.
        """
        known = ((record, getattr(record.signals, name)) for record in self.history)
        values = sorted(
            float(value)
            for record, value in known
            if first <= record.signals.step < end and not record.skipped and value is not None
        )
        return values[len(values) // 2] if values else 0.0

    def recent_loss(self) -> float | None:
        """Mean loss of the last applied steps; `None` if there is none."""
        losses = [r.signals.loss for r in list(self.history)[-RECENT_STEPS:] if not r.skipped]
        known = [loss for loss in losses if loss is not None and math.isfinite(loss)]
        return math.fsum(known) / len(known) if known else None

    def instability(self, steps: int = QUIET_STEPS) -> tuple[str, ...]:
        """The reasons why the last steps were not quiet; empty if they were."""
        last = self.history[-1].signals.step if self.history else 0
        return self.budgets.instability(last - steps)

    def settings(self) -> dict[str, str]:
        """The settings of the parts, which decide whether a saved state still fits."""
        parts = {
            "look_back": self.alarms.look_back,
            "escalation": self.budgets.escalation,
            "recovery": self.budgets.recovery,
        }
        return {name: settings_of(part) for name, part in parts.items()}

    def state_dict(self) -> RunHistoryState:
        """Everything that affects later decisions; the history itself is not included."""
        alarms, budgets = self.alarms.state_dict(), self.budgets.state_dict()
        return {
            "settings": self.settings(),
            "look_back": alarms["look_back"],
            **budgets,
            "own": alarms["own"],
            "active": alarms["active"],
            "counts": dict(self.counts),
            "by_kind": dict(self.by_kind),
            "recent_norms": list(self._recent_norms),
        }

    def load_state_dict(self, state: RunHistoryState) -> None:
        """Continue from a saved state. A part whose settings have changed starts again."""
        same = {part: state["settings"].get(part) == now for part, now in self.settings().items()}
        log_changed_parts(state["settings"], self.settings())
        self.alarms.load_state_dict(state, same["look_back"])
        self.budgets.load_state_dict(state, same["escalation"], same["recovery"])
        self.counts = dict(state["counts"])
        self.by_kind = dict(state["by_kind"])
        self._recent_norms = deque(state["recent_norms"], maxlen=RECENT_NORMS)
        self._unsettled = None


def _is_as_large(refused: Incident, following: StepRecord) -> bool:
    """Whether the following step was applied with a gradient closer to the refused one than to the usual ones.

    Closer by its factor: above the geometric mean of the two.
    """
    before, usual = (refused.evidence.get(name) for name in ("grad_norm", "typical_grad_norm"))
    now = following.signals.grad_norm
    if following.skipped or not before or not usual or now is None:
        return False
    return bool(now > math.sqrt(before * usual))


def _was_any_applied(history: Iterable[StepRecord], escalation: Escalation | None) -> bool:
    """Whether any of the last steps was applied, of as many as use up all budgets."""
    least = 0 if escalation is None else min((escalation.skips + 1) * (escalation.cuts + 1), HISTORY_STEPS)
    return sum(each.skipped for each in list(history)[-least:]) < least


def _fresh(name: str) -> tuple[Detector, Any]:
    detector = sustained(Spike((name,)), steps=2)
    return detector, detector.init()
