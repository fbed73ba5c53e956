"""`FactsFromSteps`: the facts of a run of which only the steps are known, such as a stabilizer's.

For each step: loss, gradient norm, learning rate, loss scale, the effect of clipping, and whether the step was skipped;
also the incidents, and the settings of the optimizer and its scheduler. Everything else (data, operations, single
parameters, seeds) is empty, and `RunFacts.scope` records this: only rules that need no more are used.

The loss of a skipped step is left out: it never reached the weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from surefoot.record.facts.description import OptimizerSetup
from surefoot.record.facts.events import IncidentEvent
from surefoot.record.facts.optimizers import LossScalerFacts, OptimizerFacts, SchedulerFacts, StepSeries
from surefoot.record.facts.run_facts import STEPS_ONLY, RunFacts

RATE_CHANGES = frozenset({"back_off", "roll_back", "reset_moments", "take_back"})
"""Actions that change the learning rate: after one of them it is no longer that of the user's schedule."""
MOST_INCIDENTS = 500


@dataclass(frozen=True, kw_only=True)
class StepValues:
    """The numbers of one step. `None` means not measured."""

    step: int
    """The step, skipped ones included."""
    loss: float | None = None
    """The loss."""
    grad_norm: float | None = None
    """The norm of the gradients before clipping."""
    lr: float | None = None
    """The learning rate of the first parameter group."""
    loss_scale: float | None = None
    """The loss scale; 1 without one."""
    clip_factor: float | None = None
    """What clipping multiplied the gradients by."""
    skipped: bool = False
    """Whether the step was not applied."""


@dataclass
class _OptimizerSteps:
    """What is known about one optimizer."""

    setup: OptimizerSetup
    steps: list[StepValues] = field(default_factory=list)

    def count(self) -> int:
        """The number of steps, including those whose rows are missing: thinned out, or lost when a run was killed."""
        return self.steps[-1].step - self.steps[0].step + 1


class FactsFromSteps:
    """Collects steps and incidents, in any order of optimizers, and makes facts of them."""

    def __init__(self) -> None:
        self._parts: dict[str, _OptimizerSteps] = {}
        self._incidents: list[IncidentEvent] = []
        self._overflows: dict[str, set[int]] = {}

    def optimizer(self, part: str, setup: OptimizerSetup) -> None:
        """Name the optimizer of a part of the run; one that is not named is known by its steps only."""
        self._parts[part] = _OptimizerSteps(setup)

    def step(self, numbers: StepValues, part: str = "") -> None:
        """A step, in the order of steps of its part."""
        self._parts.setdefault(part, _OptimizerSteps(OptimizerSetup())).steps.append(numbers)

    def overflow(self, step: int, part: str = "") -> None:
        """Half-precision gradients overflowed at a step. The step is skipped; this is not an incident."""
        self._overflows.setdefault(part, set()).add(step)

    def incident(self, incident: IncidentEvent) -> None:
        """An incident has happened."""
        if len(self._incidents) < MOST_INCIDENTS:
            self._incidents.append(incident)

    def facts(self) -> RunFacts:
        """All facts."""
        parts = [(name, part) for name, part in self._parts.items() if part.steps]
        changed = min((each.step for each in self._incidents if each.action in RATE_CHANGES), default=None)
        return RunFacts(
            scope=STEPS_ONLY,
            steps=max((part.count() for _, part in parts), default=0),
            backwards=sum(part.count() for _, part in parts),
            optimizers=[_optimizer(number, part, changed) for number, (_, part) in enumerate(parts)],
            schedulers=[
                SchedulerFacts(type=part.setup.scheduler, site="", steps=0, last_epoch=0, optimizer=number)
                for number, (_, part) in enumerate(parts)
                if part.setup.scheduler is not None
            ],
            events=[*self._incidents],
            loss_scaler=self._scaler(parts),
        )

    def _scaler(self, parts: list[tuple[str, _OptimizerSteps]]) -> LossScalerFacts:
        """What the scaler of the first optimizer that has one did."""
        for name, part in parts:
            overflows = self._overflows.get(name, set())
            scales = [each.loss_scale for each in part.steps if each.loss_scale is not None]
            if not overflows and all(scale == 1.0 for scale in scales):
                continue
            skipped = [place for place, each in enumerate(part.steps) if each.step in overflows]
            return LossScalerFacts(
                enabled=True,
                scale=scales[-1] if scales else None,
                attempts=len(part.steps),
                skips=len(skipped),
                skip_steps=skipped[-500:],
                trace=scales[:500] + scales[500:][-1500:],
            )
        return LossScalerFacts()


def _optimizer(number: int, part: _OptimizerSteps, changed: int | None) -> OptimizerFacts:
    steps = part.steps
    return OptimizerFacts(
        number=number,
        type=part.setup.type or "the optimizer",
        settings=list(part.setup.settings),
        steps=part.count(),
        series=StepSeries(
            grad_norm=_column([each.grad_norm for each in steps]),
            skipped=[each.skipped for each in steps] if any(each.skipped for each in steps) else [],
            loss=_column([None if each.skipped else each.loss for each in steps]),
            lr=_column([each.lr if changed is None or each.step < changed else None for each in steps]),
            clip_norm=_column([each.grad_norm if each.clip_factor is not None else None for each in steps]),
            clip_limit=_column([_limit(each) for each in steps]),
            scale=_column([each.loss_scale for each in steps]),
            at=[each.step for each in steps],
            step=[each.step for each in steps],
        ),
    )


def _column(values: list[float | None]) -> list[float | None]:
    return values if any(value is not None for value in values) else []


def _limit(each: StepValues) -> float | None:
    """The norm that was left: of a step that was not clipped, all of it."""
    if each.grad_norm is None or each.clip_factor is None or not math.isfinite(each.grad_norm):
        return None
    return each.grad_norm * each.clip_factor
