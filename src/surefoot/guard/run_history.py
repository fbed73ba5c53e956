"""The history of a run: every step, alarms and incidents, and the decision what to do about each step.

On a GPU the numbers of a step arrive a few steps after it, always the same few, so that a run decides the same way
every time. Whether a step is applied was decided on the device long before. Three parts:

- `RunHistory` keeps records, incidents and counts, and takes steps in;
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
from surefoot.decide.repeat import RepeatPlanner, RepeatState
from surefoot.detect.combine import Combined, sustained, tolerated
from surefoot.detect.step_rules import Spike
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
"""How many of them keep their per-layer statistics, which of a large model are the bulk."""
INCIDENTS_KEPT = 200
RECENT_STEPS = 50
REASONS_KEPT = 5
QUIET_STEPS = 10
"""Steps without a refusal or a setback before the run counts as quiet."""
SETBACKS_COUNTED = 3
"""Setbacks in a row from which on the run is not quiet: a single one is noise."""
LOGGED_INCIDENTS = 20
"""Incidents of one kind that are logged one by one; later ones are only counted."""

_USED_UP = (
    "the loss is above its earlier level, and all returns are used up: the run continues without returns until "
    "`TrainingRecovery.calm_steps` healthy steps restore one"
)
_RETURNS = ("roll_back", "reset_moments", "take_back")
"""Actions after which the steps taken since count for nothing."""


class AlarmsState(TypedDict):
    """What is stored of `Alarms`."""

    look_back: Packed
    """The state of the detectors that look back over many steps."""
    own: dict[str, Packed]
    """The states of the detectors of the user's own signals, by signal."""
    active: list[str]
    """Kind and severity of each alarm that is raised."""


class _RepeatBudget(TypedDict, total=False):
    repeat: Packed
    """Where repeats stand, of a run that repeats the steps that a return undoes."""


class BudgetsState(_RepeatBudget):
    """What is stored of `Budgets`."""

    escalation: Packed
    recovery: Packed
    instability: list[list[int | str]]
    """Step and sentence of the last reasons why the run was not quiet."""


class RunHistoryState(AlarmsState, BudgetsState):
    """What is stored of a `RunHistory` and of its two parts."""

    settings: dict[str, str]
    """What the parts were set to."""
    counts: dict[str, int]
    """How many steps there were, and how many of them were skipped, clipped and so on."""
    by_kind: dict[str, int]
    """How many incidents there were of each kind."""


class Alarms:
    """Detectors that look back over many steps; they raise incidents and refuse nothing."""

    def __init__(self, checker: StabilityChecker) -> None:
        self.look_back = tolerated(Combined(checker.look_back, "any")) if checker.look_back else None
        self._look_back_state = self.look_back.init() if self.look_back else ()
        self._own: dict[str, tuple[Detector, Any]] = {}
        self._active: set[str] = set()

    def ahead(self) -> Alarms:
        """A copy with states of its own."""
        ahead = copy.copy(self)
        ahead._own, ahead._active = dict(self._own), set(self._active)
        ahead._look_back_state = copy.deepcopy(self._look_back_state)
        return ahead

    def update(self, record: StepRecord, note: Note) -> None:
        """Take one step in; `note` records an incident.

        A step that is not applied, or would not have been, is no part of a baseline.
        """
        self._watch_own_signals(record.signals, note)
        if not record.skipped and not record.reasons:
            self._watch_behind(record.signals, note)

    def applied_nonetheless(self, record: StepRecord, explain: Callable[[], tuple[str, Evidence]], note: Note) -> None:
        """Where steps are only watched, one that would be refused is applied: an incident when that starts."""
        kind = record.reasons[0] if record.reasons else "refused"
        if record.skipped or not record.reasons:
            self._active -= {each for each in self._active if each.endswith("/applied")}
        elif f"{kind}/applied" not in self._active:
            self._active.add(f"{kind}/applied")
            summary, evidence = explain()
            note(record.signals, kind, "error", summary, evidence=evidence)

    def _watch_behind(self, signals: Signals, note: Note) -> None:
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
        """An alarm is an incident when it starts, and when a remark becomes a warning; not for as long as it lasts."""
        known = f"{kind}/{verdict.severity}"
        if not verdict.anomalous:
            self._active -= {f"{kind}/{severity}" for severity in ("info", "warning", "error")}
        elif known not in self._active:
            self._active.add(known)
            note(signals, kind, verdict.severity, verdict.summary, evidence=dict(verdict.evidence))

    def state_dict(self) -> AlarmsState:
        """The states of the detectors, and which alarms are raised."""
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
    """What may be done about refused steps and setbacks, and how much of it is left."""

    def __init__(
        self,
        escalation: Escalation | None,
        recovery: TrainingRecovery | None,
        scale_floor: float | None,
        weights_broken: Callable[[], bool],
        agreed: Callable[[bool], bool],
    ) -> None:
        """Start with full budgets.

        Args:
            escalation: skip, then cut the learning rate, then halt.
            recovery: return to earlier weights.
            scale_floor: the lowest loss scale; an overflow there is a refused step.
            weights_broken: whether a parameter is not finite on this rank.
            agreed: whether the flag is set on any rank.
        """
        self.escalation, self.recovery, self._scale_floor = escalation, recovery, scale_floor
        self._escalation_state = escalation.init() if escalation else None
        self._recovery_state = recovery.init() if recovery else None
        self.repeats = RepeatPlanner(recovery)
        self.weights_broken, self.agreed = weights_broken, agreed
        self._reasons: deque[tuple[int, str]] = deque(maxlen=REASONS_KEPT)

    def ahead(self) -> Budgets:
        """A copy that communicates with no other rank: only this one may be reading."""
        ahead = copy.copy(self)
        ahead._reasons, ahead.agreed = self._reasons.copy(), lambda flag: flag
        ahead.repeats = copy.copy(self.repeats)
        return ahead

    def is_stuck(self, record: StepRecord) -> bool:
        """Whether gradients overflow at the lowest loss scale."""
        floor = self._scale_floor
        return record.overflow and floor is not None and record.signals.loss_scale <= floor  # type: ignore[return-value]

    def refuses(self, record: StepRecord) -> bool:
        """Whether the step was refused, and not merely skipped for a smaller loss scale."""
        return record.skipped and (not record.overflow or self.is_stuck(record))

    def escalate(self, record: StepRecord, refused: bool, summary: str) -> Decision:
        """What to do about a step; `summary` is why it was refused."""
        if self.escalation is None:
            decision = Decision("skip" if refused else "none", summary)
        else:
            self._escalation_state, decision = self.escalation.update(self._escalation_state, refused, summary)  # type: ignore[arg-type]
        if refused:
            step = record.signals.step
            self._reasons.append((step, f"step {step} was refused: {summary}"))
        return decision

    def recover(self, record: StepRecord, refused: bool, decision: Decision) -> Decision:
        """Let the recovery see the step; what it calls for comes before what skipping would."""
        if self.recovery is None:
            return decision
        assert self._recovery_state is not None
        step, setback, lost = record.signals.step, "setback" in record.notices, "lost_progress" in record.notices
        if record.reasons == (BROKEN_SETTING,):  # no earlier weights would help
            return replace(decision, lr_factor=decision.lr_factor * self.recovery.cut(self._recovery_state))
        # Every rank gets here with the same flags, so every rank takes part.
        broken = refused and "nonfinite" in record.reasons and self.agreed(self.weights_broken())
        self._recovery_state, advice = self.recovery.update(
            self._recovery_state, step, refused=refused, setback=setback, lost=lost, broken=broken
        )
        advice = self.repeats.advise(step, refused or setback or lost or broken, advice)
        if (setback or lost) and self._recovery_state.unhealthy >= SETBACKS_COUNTED:
            loss = format_number(record.signals.loss)
            self._reasons.append((step, f"the loss at step {step} is {loss}, so much of the progress is lost"))
        decision = replace(decision, lr_factor=decision.lr_factor * advice.lr_factor)
        if advice.action == "none":
            return decision
        if advice.action != "halt" and self._escalation_state is not None:
            self._escalation_state = self._escalation_state._replace(skips=0.0)
        return replace(advice, lr_factor=decision.lr_factor)

    def decline_return(self) -> None:
        """The return that was just called for was not made."""
        assert self.recovery is not None
        assert self._recovery_state is not None
        self._recovery_state = self.recovery.decline(self._recovery_state)

    @property
    def healthy(self) -> bool:
        """Whether the last step was neither refused nor a setback."""
        return self.onset is None

    @property
    def onset(self) -> int | None:
        """The step at which the current problem began; `None` if the run is healthy."""
        return None if self._recovery_state is None or self._recovery_state.onset < 0 else self._recovery_state.onset

    @property
    def out_of_returns(self) -> bool:
        """Whether a return is called for and none is left."""
        return self.recovery is not None and self.recovery.is_exhausted(self._recovery_state)  # type: ignore[arg-type]

    @property
    def returns_tried(self) -> int:
        """How many states were returned to since the last healthy step, the one now called for included."""
        return 0 if self._recovery_state is None else self._recovery_state.returned

    def instability(self, since_step: int) -> tuple[str, ...]:
        """Why steps after `since_step` were not quiet; empty if they were."""
        return tuple(reason for step, reason in self._reasons if step > since_step)

    def state_dict(self) -> BudgetsState:
        """What is left of the budgets."""
        state: BudgetsState = {
            "escalation": pack(self._escalation_state),
            "recovery": pack(self._recovery_state),
            "instability": [list(reason) for reason in self._reasons],
        }
        if self.repeats.state is not None:
            state["repeat"] = pack(self.repeats.state)
        return state

    def load_state_dict(self, state: BudgetsState, same_escalation: bool, same_recovery: bool) -> None:
        """Continue from a saved state; budgets with other settings start full."""
        if self.escalation and same_escalation:
            self._escalation_state = unpack(self.escalation.init(), state["escalation"])
        if self.recovery and same_recovery:
            self._recovery_state = unpack(self.recovery.init(), state["recovery"])
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
            budgets: decide what is done about a step.
            first_of: of several parameters, the one whose gradient was ready first.
            on_event: called with each incident.
            announce: whether each incident is logged as a warning.
        """
        self.alarms, self.budgets = Alarms(checker), budgets
        self._refusals = RefusalExplainer(checker, first_of, budgets.weights_broken)
        self.history: deque[StepRecord] = deque(maxlen=HISTORY_STEPS)
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

    def ahead(
        self,
        records: Iterable[StepRecord],
        stale_before: float,
        on_event: Callable[[Incident], None] | None = None,
    ) -> RunHistory:
        """A copy that includes steps which have not been processed yet, for reading.

        The copy logs nothing, and calls `on_event` with each new incident. This history stays as it is: what the steps
        call for is done when their turn comes, whether or not they were read before. Steps before `stale_before` are
        only counted, and so are those after a step that calls for a return.
        """
        ahead = copy.copy(self)
        ahead.history, ahead.incidents = self.history.copy(), self.incidents.copy()
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
        """Take one step in; returns what is to be done from here on."""
        self.count(record)
        self.alarms.update(record, self.note)
        refused, is_stuck = self.budgets.refuses(record), self.budgets.is_stuck(record)
        is_first = "nonfinite" not in self.by_kind
        explain = partial(self._refusals.explain, record, self.history, is_stuck=is_stuck, is_first=is_first)
        summary, evidence = explain() if refused else ("", {})
        decision = self.budgets.escalate(record, refused, summary)
        if refused:
            kind = record.reasons[0] if record.reasons else "refused"
            kind = "precision.scaler-stuck" if is_stuck else kind
            self.note(record.signals, kind, "error", summary, decision.action, evidence)
        else:
            self.alarms.applied_nonetheless(record, explain, self.note)
        decision = self.budgets.recover(record, refused, decision)
        if decision.action == "none" and self.budgets.out_of_returns:
            self.warn_once(record.signals, "recovery.used-up", _USED_UP)
        return decision

    def count(self, record: StepRecord) -> None:
        """Take one step into the history and the counts, and draw no conclusion."""
        self._remember(record)
        self.counts["steps"] += 1
        self.counts["skipped" if record.skipped else "applied"] += 1
        self.counts["overflows"] += record.overflow
        self.counts["clipped"] += not record.skipped and bool(record.signals.clip_factor < 1.0)

    def _remember(self, record: StepRecord) -> None:
        """Append to the history; what is a while back keeps its numbers and gives up its layers."""
        self.history.append(record)
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
    ) -> Incident:
        """Record an incident, call `on_event` and log a warning."""
        incident = Incident(signals.step, kind, severity, summary, action, evidence or {}, signals)
        self.incidents.append(incident)
        self.by_kind[kind] = seen = self.by_kind.get(kind, 0) + 1
        self.counts["alarms"] += severity != "info"
        if self.on_event is not None:
            self.on_event(incident)
        if self._logs and severity != "info" and seen <= LOGGED_INCIDENTS:
            last = f" (later incidents of kind {kind!r} are counted, not logged)" if seen == LOGGED_INCIDENTS else ""
            log.warning("surefoot: %s%s", incident, last)
        return incident

    def warn_once(self, signals: Signals, kind: str, summary: str) -> None:
        """Record a warning the first time only."""
        if kind not in self.by_kind:
            self.note(signals, kind, "warning", summary)

    @property
    def healthy(self) -> bool:
        """Whether the last step was neither refused nor a setback."""
        return self.budgets.healthy

    @property
    def onset(self) -> int | None:
        """The step at which the current problem began; `None` if the run is healthy."""
        return self.budgets.onset

    def typical_gradient(self, first: int, end: int) -> float:
        """Median gradient norm of the steps from `first` up to `end` that were applied; 0 if there were none.

        The median, since damaged weights have large gradients: a few of those must not explain that weights have moved.
        """
        norms = sorted(
            float(record.signals.grad_norm)
            for record in self.history
            if first <= record.signals.step < end and not record.skipped and record.signals.grad_norm is not None
        )
        return norms[len(norms) // 2] if norms else 0.0

    def recent_loss(self) -> float | None:
        """Mean loss of the last applied steps; `None` if there is none."""
        losses = [r.signals.loss for r in list(self.history)[-RECENT_STEPS:] if not r.skipped]
        known = [loss for loss in losses if loss is not None and math.isfinite(loss)]
        return math.fsum(known) / len(known) if known else None

    def instability(self, steps: int = QUIET_STEPS) -> tuple[str, ...]:
        """Why the last steps were not quiet; empty if they were."""
        last = self.history[-1].signals.step if self.history else 0
        return self.budgets.instability(last - steps)

    def settings(self) -> dict[str, str]:
        """What the parts are set to, to decide whether a saved state still fits."""
        parts = {
            "look_back": self.alarms.look_back,
            "escalation": self.budgets.escalation,
            "recovery": self.budgets.recovery,
        }
        return {name: settings_of(part) for name, part in parts.items()}

    def state_dict(self) -> RunHistoryState:
        """Everything that decides what happens next; the history itself is not part of it."""
        alarms, budgets = self.alarms.state_dict(), self.budgets.state_dict()
        return {
            "settings": self.settings(),
            "look_back": alarms["look_back"],
            **budgets,
            "own": alarms["own"],
            "active": alarms["active"],
            "counts": dict(self.counts),
            "by_kind": dict(self.by_kind),
        }

    def load_state_dict(self, state: RunHistoryState) -> None:
        """Continue from a saved state. A part whose settings have changed starts again."""
        same = {part: state["settings"].get(part) == now for part, now in self.settings().items()}
        self.alarms.load_state_dict(state, same["look_back"])
        self.budgets.load_state_dict(state, same["escalation"], same["recovery"])
        self.counts = dict(state["counts"])
        self.by_kind = dict(state["by_kind"])


def _fresh(name: str) -> tuple[Detector, Any]:
    detector = sustained(Spike((name,)), steps=2)
    return detector, detector.init()
