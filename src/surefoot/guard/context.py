"""`GuardContext`: the parts of every guarded or watched optimizer, built and connected in one place.

`attach` adds the hooks of an optimizer to them, `TrainingStabilizer` adds backward, accumulation, checkpoints and
recovery. The parts have no reference to their owner: the connections between them are made here.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from surefoot.act.shape import warn_of_unmatched
from surefoot.decide.agreement import Ranks, find_group
from surefoot.decide.recovery import Escalation
from surefoot.decide.unguardable import SetupOfRanks
from surefoot.detect.checker import StabilityChecker
from surefoot.detect.combine import Combined, tolerated
from surefoot.detect.step_rules import Explosion
from surefoot.guard.guarded_optimizer import GuardedOptimizer
from surefoot.guard.log_rows import LogRows, open_log, setup_of
from surefoot.guard.model_sampling import ModelSampler, Sampling
from surefoot.guard.rank_watching import watch_rank
from surefoot.guard.replica_check import replica_check
from surefoot.guard.run_history import Budgets, RunHistory
from surefoot.guard.step_decision import StepDecider, StepPolicy
from surefoot.guard.step_hooks import run_directly
from surefoot.guard.step_results import call_each
from surefoot.guard.validation import as_scaler, split_clip
from surefoot.observe.parameters import BackwardOrder
from surefoot.observe.tensors import LayerMetrics

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from os import PathLike
    from pathlib import Path

    from torch import Tensor, nn

    from surefoot.decide.recovery import TrainingRecovery
    from surefoot.guard.step_decision import StepDecision
    from surefoot.guard.validation import Precision
    from surefoot.observe.parameters import Layout
    from surefoot.record.incidents.bundle import IncidentKeeper
    from surefoot.record.log import RunLog
    from surefoot.types import Clipper, Incident, LossScaler, Shaper, StepRecord

DecideOn = Literal["auto", "host", "device"]
Mode: TypeAlias = Literal["guard", "watch"]


@dataclass(frozen=True)
class GuardSettings:
    """The settings of `attach` and `TrainingStabilizer`, described there, and those that only `surefoot run` has."""

    mode: Mode = "guard"
    clip: Clipper | Shaper | Sequence[Clipper | Shaper] | None = None
    checker: StabilityChecker | None = None
    escalation: Escalation | None = Escalation()  # noqa: RUF009 (frozen)
    recovery: TrainingRecovery | None = None
    incidents: IncidentKeeper | str | Path | None = None
    log: str | PathLike[str] | RunLog | None = None
    watch: LayerMetrics | None = None
    on_step: Callable[[StepRecord], None] | None = None
    on_event: Callable[[Incident], None] | None = None
    decide_on: DecideOn = "auto"
    lag_steps: int = 4
    precision: Precision | None = None
    scaler: Any = None
    scheduler: Any = None
    samples_model: bool = True
    """Whether the log gets histograms and activations of sampled steps."""
    name_of: Callable[[Tensor], str | None] | None = None
    """Names parameters that belong to none of the models."""
    announce: bool = True
    """Whether each incident is logged as a warning."""
    on_decision: Callable[[StepDecision, bool], None] | None = None
    """Called between the decision and the optimizer's step, for what must be done before the step is applied.

    Not called for an optimizer that evaluates its closure several times. On the device the numbers of the decision are
    tensors.
    """
    run_hook: Callable[..., Any] = run_directly
    """Called as `run_hook(hook, *args)` for every hook; returns what the hook returns."""

    @property
    def acts(self) -> bool:
        """Whether broken steps are skipped."""
        return self.mode == "guard"


@dataclass(frozen=True)
class GuardContext:
    """The connected parts of one guard."""

    layout: Layout
    """The optimizer's parameters and their names."""
    policy: StepPolicy
    """Step rules, clipper and loss scaler with their states."""
    decider: StepDecider
    guarded: GuardedOptimizer
    history: RunHistory
    order: BackwardOrder
    ranks: Ranks
    setup: SetupOfRanks | None
    """Checks that all ranks can refuse a step together; `None` for one rank."""
    shapers: tuple[Shaper, ...]
    decides_on_device: bool
    lag_steps: int
    """The number of steps after which the host reads a step: 0 if the host decides."""
    log: RunLog | None
    rows: LogRows | None
    """The rows of the log."""
    on_step: Callable[[StepRecord], None] | None
    """Called with every step when its numbers have arrived."""


def build_guard(models: Sequence[nn.Module], optimizer: Any, layout: Layout, settings: GuardSettings) -> GuardContext:
    """Build the parts of a guard and connect them."""
    acts, recovery, log, decide_on = settings.acts, settings.recovery, settings.log, settings.decide_on
    home, together = layout.home, find_group(models)
    on_device = decide_on == "device" or (decide_on == "auto" and home.type != "cpu")
    ranks = Ranks(together if acts else None, home)  # watching starts no collective
    shapers, clipper = split_clip(settings.clip)
    every, setup = Ranks(together, home), setup_of(optimizer, settings.scheduler) if log is not None else None
    run_log = open_log(log, every, setup)
    watch = settings.watch or (LayerMetrics() if run_log is not None else None)  # a log records layers
    sampler = _sampler(models, watch or LayerMetrics()) if run_log is not None and settings.samples_model else None
    rows = None if run_log is None else _rows(run_log, sampler, settings.incidents is not None, every)
    checker = settings.checker or StabilityChecker()
    warn_of_unmatched(shapers, [name for name, _ in layout.parameters])
    loss_scaler = as_scaler(settings.scaler, settings.precision, home)
    policy = _policy(checker, recovery, clipper, loss_scaler, layout, on_device)
    decider = StepDecider(policy, ranks.group, replicas := replica_check(models, optimizer, layout, ranks))
    guarded = GuardedOptimizer(optimizer, layout, decider, shapers, watch, on_device, acts=acts, sampler=sampler)
    order = BackwardOrder(layout.parameters if acts else [])
    budgets = _budgets(settings.escalation if acts else None, recovery, loss_scaler, guarded, ranks)
    on_event = call_each(rows.incident if rows else None, settings.on_event)
    history = RunHistory(checker, budgets, order.first, on_event, announce=settings.announce)
    report = replicas.report_to(history) if replicas else None
    return GuardContext(
        layout=layout, policy=policy, decider=decider, guarded=guarded, history=history, order=order, ranks=ranks,
        setup=SetupOfRanks(models) if ranks.several else None, shapers=shapers,
        decides_on_device=on_device, lag_steps=settings.lag_steps if on_device else 0, log=run_log, rows=rows,
        on_step=call_each(rows.step if rows else None, report, settings.on_step),
    )  # fmt: skip


def _rows(log: RunLog, sampler: ModelSampler | None, keeps_incidents: bool, ranks: Ranks) -> LogRows:
    return LogRows(log, sampler, keeps_incidents=keeps_incidents, rank=watch_rank(log, ranks))


def _sampler(models: Sequence[nn.Module], watch: LayerMetrics) -> ModelSampler:
    return ModelSampler(models, Sampling(every_steps=watch.sample_every_steps), activations=watch.activations)


def _policy(
    checker: StabilityChecker,
    recovery: TrainingRecovery | None,
    clipper: Clipper | None,
    scaler: LossScaler | None,
    layout: Layout,
    on_device: bool,
) -> StepPolicy:
    is_safe = clipper is not None or recovery is not None  # then a step with a large gradient does no lasting harm
    rules = tuple(
        replace(rule, expects_levels=True) if is_safe and isinstance(rule, Explosion) else rule
        for rule in checker.step_rules
    )
    return StepPolicy(
        tolerated(Combined(rules, "any")) if rules else None,
        tolerated(checker.setback) if recovery and checker.setback else None,
        clipper,
        scaler,
        count=len(layout.parameters),
        home=layout.home,
        on_device=on_device,
        lost_progress=tolerated(checker.lost_progress) if recovery and checker.lost_progress else None,
    )


def _budgets(
    escalation: Escalation | None,
    recovery: TrainingRecovery | None,
    scaler: LossScaler | None,
    guarded: GuardedOptimizer,
    ranks: Ranks,
) -> Budgets:
    broken = weakref.WeakMethod(guarded.measurer.parameters_broken)  # the history must not keep parameters alive

    def weights_broken() -> bool:
        method = broken()
        return method is not None and method()

    floor = scaler.floor if scaler else None
    return Budgets(escalation, recovery, floor, weights_broken, ranks.any, alone=not ranks.several)
