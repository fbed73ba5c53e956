"""The facts of a run that has a run log and no `facts.json`: those of a stabilizer, read from its tables.

Killed and unfinished runs, and runs with several optimizers, are supported.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from surefoot.record.facts.events import IncidentEvent
from surefoot.record.facts.from_steps import FactsFromSteps, StepValues
from surefoot.record.facts.run_facts import GuardFacts, PolicySignal, RunFacts
from surefoot.record.policy_signals import kind_of
from surefoot.record.schema import SIGNAL

if TYPE_CHECKING:
    from surefoot.record.facts.description import RunDescription
    from surefoot.record.messages import Event
    from surefoot.record.reading import RunTables

SCALER_STUCK = "precision.scaler-stuck"
"""The kind of incident that an overflow at the lowest scale is."""
_INCIDENTS = frozenset({"skip", "rollback", "halt", "alarm", "spike"})
_COLUMNS = ("loss", "grad_norm", "lr", "loss_scale", "clip_factor")


def facts_of_log(tables: RunTables, description: RunDescription) -> RunFacts:
    """The content of the tables, as facts."""
    made = FactsFromSteps()
    columns = {name: tables.scalars.column(name).to_pylist() for name in ("step", "part", "skipped", *_COLUMNS)}
    rows = list(zip(columns["step"], columns["part"], columns["skipped"], strict=True))
    for setup in description.optimizers:
        # Optimizers that share a part cannot be distinguished by their rows.
        if all(other == setup for other in description.optimizers if other.part == setup.part):
            made.optimizer(setup.part, setup)
    for row, (step, part, skipped) in enumerate(rows):
        numbers = {name: columns[name][row] for name in _COLUMNS}
        made.step(StepValues(step=step, skipped=bool(skipped), **numbers), part or "")
    for event in tables.events:
        if event.step is None:
            continue
        if event.event == "overflow" or event.cause == SCALER_STUCK:
            made.overflow(event.step, event.part)
        if event.event in _INCIDENTS:
            made.incident(_incident(event))
    return replace(made.facts(), policy_signals=_policy_signals(tables))


def with_log(facts: RunFacts, tables: RunTables) -> RunFacts:
    """The facts of a training that was observed from inside, completed from the log of its guard.

    The guard may refuse steps for several reasons; `guard` contains those that were not finite, as under `--guard`.
    Steps of the log are counted from the beginning of the run, those of the facts from that of the observation.
    """
    began = facts.began_at
    columns = [tables.scalars.column(name).to_pylist() for name in ("step", "skipped", "loss", "grad_norm")]
    overflows = {event.step for event in tables.events if event.event == "overflow"}
    skipped = [
        step - began
        for step, skips, *numbers in zip(*columns, strict=True)
        if skips and step >= began and step not in overflows and not all(map(_is_finite, numbers))
    ]
    guard = GuardFacts(
        checked=facts.steps,
        skipped=len(skipped),
        first=min(skipped, default=None),
        last=max(skipped, default=None),
        parameters=[],
        not_guarded={},
    )
    incidents = [
        _incident(event, began)
        for event in tables.events
        if event.step is not None and event.step >= began and event.event in _INCIDENTS
    ]
    signals = [replace(each, step=each.step - began) for each in _policy_signals(tables) if each.step >= began]
    return replace(facts, guard=guard, events=[*facts.events, *incidents], policy_signals=signals)


def _policy_signals(tables: RunTables) -> list[PolicySignal]:
    """What a trainer of policies has logged; a signal that is not finite is an incident of its own."""
    scalars = tables.scalars
    known = [
        (name, kind)
        for name in scalars.column_names
        if name.startswith(SIGNAL) and (kind := kind_of(name[len(SIGNAL) :]))
    ]
    steps = scalars.column("step").to_pylist() if known else []
    return [
        PolicySignal(step=step, kind=kind, name=name[len(SIGNAL) :], value=value)
        for name, kind in known
        for step, value in zip(steps, scalars.column(name).to_pylist(), strict=True)
        if value is not None and math.isfinite(value)
    ]


def _is_finite(value: float | None) -> bool:
    return value is None or math.isfinite(value)


def _incident(event: Event, began: int = 0) -> IncidentEvent:
    """The event as an incident of a run whose steps are counted from `began` on."""
    # A return that repeats steps is logged at the last step that it keeps.
    decided_at = event.evidence.get("decided_at", event.step)
    return IncidentEvent(
        step=decided_at - began,
        kind=event.cause or event.event,
        severity=event.severity,
        action=event.action,
        summary=event.summary,
    )
