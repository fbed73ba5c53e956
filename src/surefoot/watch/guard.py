"""The guard under `surefoot run`: every optimizer of the script is attached to it (`surefoot.guard.attach`).

By default it observes: it measures the gradients of a step and changes nothing; on a device, it does not measure every
step (`measuring_budget`). With `--guard` it also skips steps whose loss or gradients are not finite; parameters,
moments and step counts stay bitwise as they were. On a GPU a fused optimizer decides on the device, without a sync; any
other one costs one scalar sync per step.

An overflow that a `GradScaler` has found is left to the scaler. Not guarded, with one line on stderr: optimizers under
several ranks whose gradients are not known to be equal on all of them (all but `DistributedDataParallel`), since a step
must be skipped on every rank or on none; steps inside a CUDA graph capture or a dispatch mode. A step that
`torch.compile` has compiled is not seen.
"""

from __future__ import annotations

import os
import weakref
from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.parallel import DistributedDataParallel

from surefoot.core.device import note_failure
from surefoot.core.weak_reference import IdentityMap
from surefoot.detect.checker import StabilityChecker
from surefoot.detect.step_rules import NonFinite
from surefoot.guard.attach import attach_with
from surefoot.guard.context import GuardSettings
from surefoot.guard.step_hooks import hooks_of, keep_hook_order, release_hook_order
from surefoot.record.facts import GuardFacts, StepSkippedEvent
from surefoot.watch.measured_steps import MeasuredSteps
from surefoot.watch.messages import print_line

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.optim import Optimizer

    from surefoot.guard.attach import Attachment
    from surefoot.guard.step_decision import StepDecision
    from surefoot.types import StepRecord
    from surefoot.watch.context import WatchContext
    from surefoot.watch.optimizer_record import OptimizerRecord
    from surefoot.watch.parameter_registry import ParameterRegistry
    from surefoot.watch.patches.hooks import Hooks
    from surefoot.watch.probe_runner import ProbeRunner

STEPS_LATER = 8
"""The host reads the numbers of a step decided on a GPU this many steps later, when they have arrived."""
MOST_NAMES = 20
MOST_WITHOUT_OPTIMIZER = 16
"""The maximum number of attachments of deleted optimizers that wait to be read: a script may make one per step."""
REPORTS = "numbers of steps"
"""The probe that receives the numbers that the guard has measured. If it fails, steps are still guarded."""
WHY_REPLICAS = "which models are replicas: their ranks must agree before a step is skipped"
RULES = StabilityChecker(**{each.name: None for each in fields(StabilityChecker) if each.name != "nonfinite"})
"""Only non-finite values are refused; the diagnosis handles everything else."""
RULES_OF_RANKS = replace(RULES, nonfinite=NonFinite(judges_loss=False))
"""The gradients are equal on all ranks, so every rank makes the same decision. The loss differs between ranks."""


class SkippedSteps:
    """The steps that the guard has skipped, and why."""

    def __init__(self, registry: ParameterRegistry) -> None:
        self._registry = registry
        self._count = 0
        self._first: int | None = None
        self._last: int | None = None
        self._names: dict[str, None] = {}
        """The parameters whose gradients were the reason, in order of first occurrence."""
        self._reasons: dict[str, None] = {}

    def add(self, optimizer: int, at: int, step: StepRecord) -> tuple[StepSkippedEvent, int]:
        """Count a skipped step; returns the event, and the number of skipped steps so far."""
        layers = step.signals.layers
        bad = layers.nonfinite_counts() if layers is not None else {}
        names = [self.label(number) for number in list(bad)[:MOST_NAMES]]
        self._count += 1
        self._first = at if self._first is None else min(at, self._first)
        self._last = at if self._last is None else max(at, self._last)
        if len(self._names) < MOST_NAMES:
            self._names |= dict.fromkeys(names)
        settings = [str(each) for each in step.settings]
        self._reasons |= dict.fromkeys(settings)
        if not bad and not settings:
            is_finite = step.signals.loss is not None and abs(float(step.signals.loss)) < float("inf")
            self._reasons["the parameters were not finite after the step" if is_finite else "the loss"] = None
        event = StepSkippedEvent(step=at, parameters=names, of=len(bad), settings=settings, optimizer=optimizer)
        return event, self._count

    def as_facts(self, checked: int, not_guarded: dict[str, str]) -> GuardFacts:
        """What the guard did."""
        return GuardFacts(
            checked=checked,
            skipped=self._count,
            first=self._first,
            last=self._last,
            parameters=list(self._names)[:MOST_NAMES],
            reasons=list(self._reasons)[:MOST_NAMES],
            not_guarded=not_guarded,
        )

    def label(self, number: str) -> str:
        """The name of a parameter, by its number in the guard."""
        return self._registry.label(self._registry.parameters[int(number)])


class TrainerGuards:
    """The guards that a trainer has attached, whose numbers are used: a second measurement would find the same."""

    def __init__(
        self,
        probes: ProbeRunner,
        probe: str,
        on_nonfinite: Callable[[OptimizerRecord], None],
        on_step: Callable[[OptimizerRecord, StepRecord], None],
    ) -> None:
        """`probe` is the name under which a failure is reported; the functions are those of `OptimizerGuard`."""
        self._probes, self._probe = probes, probe
        self._on_nonfinite, self._on_step = on_nonfinite, on_step
        self._attachments: IdentityMap[Attachment] = IdentityMap()
        self.has_any = False

    def add(self, attachment: Attachment, optimizer: Optimizer) -> None:
        """A trainer guards an optimizer: `decided` and `arrived` will be called with the numbers of its steps."""
        self.has_any = True
        self._attachments.set(optimizer, attachment)

    def of(self, optimizer: Optimizer) -> Attachment | None:
        """The guard of an optimizer; `None` if the trainer has none for it."""
        return self._attachments.get(optimizer) if self.has_any else None

    def decided(self, record: OptimizerRecord, decision: StepDecision) -> None:
        """A guard has decided on a step."""
        if not isinstance(decision.nonfinite, Tensor) and decision.nonfinite:
            self._probes.safely(self._probe, self._on_nonfinite, record)

    def arrived(self, record: OptimizerRecord, step: StepRecord) -> None:
        """The numbers of a step have arrived at its guard."""
        self._probes.safely(REPORTS, self._on_step, record, step)

    def settle(self) -> None:
        """Read the steps that have not been read yet. Waits for the device."""
        for attachment in self._attachments.values():
            attachment.settle()


class OptimizerGuard:
    """Attaches the guard to the optimizers of a script, and counts its actions."""

    def __init__(
        self,
        context: WatchContext,
        on_nonfinite: Callable[[OptimizerRecord], None],
        on_step: Callable[[OptimizerRecord, StepRecord], None],
        on_measure: Callable[[OptimizerRecord, Optimizer], None],
    ) -> None:
        """`on_nonfinite` is called before a bad step is applied or skipped, `on_step` once its numbers are known.

        `on_measure` is called before a step that might have been healthy is measured in full.
        """
        self._state, self._probes, self._registry = context.state, context.probes, context.registry
        self._on_nonfinite, self._on_step = on_nonfinite, on_step
        self.acts = context.options.guard
        self.probe = "skipped steps" if self.acts else "gradient norms"
        """The name under which a failure is reported."""
        self.measured = MeasuredSteps(context, self.probe, on_measure)
        self._attachments: IdentityMap[Attachment] = IdentityMap()
        self.trainers = TrainerGuards(context.probes, self.probe, on_nonfinite, on_step)
        self._without_optimizer: list[Attachment] = []
        """Attachments whose optimizer was deleted, with steps that may not have been read yet."""
        self._replicas: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        self._checked = 0
        self.skipped = SkippedSteps(context.registry)
        self._not_guarded: dict[str, str] = {}
        self._ended: set[int] = set()
        """The numbers of optimizers whose guard has failed."""

    def install(self, hooks: Hooks) -> None:
        """Called once, before any optimizer is made."""
        keep_hook_order()
        hooks.keep(release_hook_order)
        if self.acts:
            hooks.after(
                DistributedDataParallel,
                "__init__",
                "replicas",
                lambda _, args, __: self._replicas.add(args[0]),
                WHY_REPLICAS,
            )

    def attachment(self, record: OptimizerRecord, optimizer: Optimizer) -> Attachment | None:
        """The attachment of an optimizer that is about to step; `None` if it has no parameters."""
        known = (self.trainers.has_any and self.trainers.of(optimizer)) or self._attachments.get(optimizer)
        if known is not None or not any(group["params"] for group in optimizer.param_groups):
            return known
        if len(self._without_optimizer) > MOST_WITHOUT_OPTIMIZER:  # their steps have arrived long ago
            self._settle_without_optimizer()
        acts = self.acts and not self._why_not(record, optimizer)
        if not acts:
            self.measured.add(record.number, optimizer)
        settings = GuardSettings(
            mode="guard" if acts else "watch",
            checker=RULES if _world_size() == 1 else RULES_OF_RANKS,
            escalation=None,
            on_step=partial(self._arrived, weakref.ref(record), acts),
            lag_steps=STEPS_LATER,
            # By number: labels depend on models that are found later.
            name_of=lambda parameter: str(self._registry.add(parameter).id),
            announce=False,
            on_decision=partial(self._decided, weakref.ref(record)),
            run_hook=partial(self._protect if acts else self._run, weakref.ref(record)),
        )
        made = attach_with(None, optimizer, settings)
        self._attachments.set(optimizer, made)
        # Nothing is read when an optimizer is deleted, which may happen anywhere in the script.
        weakref.finalize(optimizer, self._without_optimizer.append, made).atexit = False
        return made

    def protect(self, optimizer: Optimizer, record_of: Callable[[Optimizer], OptimizerRecord]) -> None:
        """With `--guard`, attach the guard before an optimizer steps, even if the script has replaced methods."""
        if self._state.active and self._attachments.get(optimizer) is None:
            self._probes.always(lambda: self.attachment(record_of(optimizer), optimizer))

    def _protect(self, ref: weakref.ref[OptimizerRecord], hook: Callable[..., Any], *args: Any) -> Any:
        """Run a hook that protects the weights. If it fails, the guard of its optimizer ends with a message."""
        record = ref()
        if is_compiling() or not self._state.active or record is None or record.number in self._ended:
            return None
        try:
            return self._probes.always(hook, *args)
        except Exception as error:
            if note_failure(error):  # the script's own step raises it too
                return None
            self._ended.add(record.number)
            why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            at = f"from step {self._state.steps:,} on"
            self._not_guarded[f"optimizer {record.number + 1} ({record.type}) {at}"] = why
            print_line(
                f"surefoot: --guard no longer checks optimizer {record.number + 1} ({record.type}): {why}. Bad steps"
            )
            print_line(f"  reach the weights {at}.")
            return None

    def _run(self, ref: weakref.ref[OptimizerRecord], hook: Callable[..., Any], *args: Any) -> Any:
        """Run a hook of an attachment that only observes."""
        record = ref()
        if is_compiling() or not self._state.active or record is None:
            return None
        return self.measured.run(record, hook, *args)

    @property
    def reports(self) -> bool:
        """Whether the numbers of each step still arrive."""
        return self.probe not in self._probes.problems and REPORTS not in self._probes.problems

    def add_change(self, change: Callable[[Optimizer, StepDecision], None]) -> None:
        """Call a function of an experiment for each step after its gradients are measured and before it is applied."""
        self.measured.changes.append(change)

    def _decided(self, ref: weakref.ref[OptimizerRecord], decision: StepDecision, refused: bool) -> None:
        """The current step is decided; `refused` is true if the host decided not to apply it."""
        record = ref()
        optimizer = record.ref() if record is not None else None
        if record is None or optimizer is None:
            return
        if refused or (not isinstance(decision.nonfinite, Tensor) and decision.nonfinite):
            self._on_nonfinite(record)
        for change in self.measured.changes:
            change(optimizer, decision)

    def _arrived(self, ref: weakref.ref[OptimizerRecord], acts: bool, step: StepRecord) -> None:
        record = ref()
        self._checked += acts
        if record is not None:
            self._probes.safely(REPORTS, self._on_step, record, step)

    def settle(self) -> None:
        """Read the steps that have not been read yet. Waits for the device."""
        self._settle_without_optimizer()
        self.trainers.settle()
        for attachment in self._attachments.values():
            attachment.settle()

    def detach(self) -> None:
        """Measure no further steps."""
        for attachment in self._attachments.values():
            attachment.detach()

    def _settle_without_optimizer(self) -> None:
        while self._without_optimizer:
            self._without_optimizer.pop(0).settle()

    def as_facts(self) -> GuardFacts | None:
        """A summary of the guard's actions; `None` if it only observed."""
        if not self.acts:
            return None
        problem = self._probes.problems.get(self.probe)
        failed = {} if problem is None else {"the rest of the run": problem}
        return self.skipped.as_facts(self._checked, self._not_guarded | failed)

    # ---- steps that are not guarded ---------------------------------------------------------------------------------

    def _why_not(self, record: OptimizerRecord, optimizer: Optimizer) -> bool:
        """Whether steps of an optimizer must not be skipped: the script guards them, or other ranks may differ."""
        if any(hooks.acts and hooks.active for hooks in hooks_of(optimizer)):
            why = "the script guards it with surefoot itself"
        elif _world_size() == 1 or _is_replicated(optimizer, list(self._replicas)):
            return False
        else:
            why = (
                "its gradients may differ between ranks, and a step must be skipped on all of them or on none. "
                "DistributedDataParallel is guarded; for sharded models use TrainingStabilizer"
            )
        name = f"optimizer {record.number + 1} ({type(optimizer).__name__})"
        self._not_guarded[name] = why
        print_line(f"surefoot: --guard does not guard {name}: {why}")
        return True


def _is_replicated(optimizer: Optimizer, replicas: Sequence[DistributedDataParallel]) -> bool:
    """Whether `DistributedDataParallel` makes every gradient the same on all ranks."""
    averaged = {
        id(parameter)
        for replica in replicas
        for name, parameter in replica.module.named_parameters()
        if name not in replica.parameters_to_ignore
    }
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return all(id(each) in averaged and not hasattr(each, "to_local") for each in parameters if each.requires_grad)


def in_words(facts: GuardFacts) -> str:
    """A summary of the guard's actions in one sentence."""
    checked, count = facts.checked, facts.skipped
    missing = [f"{name} was not guarded: {why}" for name, why in facts.not_guarded.items()]
    if not checked:
        return ". ".join(["--guard checked no step" if missing else "--guard saw no optimizer step to check", *missing])
    words = f"--guard checked {checked:,} step{'s' if checked != 1 else ''} and skipped "
    if not count:
        return ". ".join([f"{words}none", *missing])
    first, last, names = facts.first, facts.last, facts.parameters
    when = f"step {first:,}" if count == 1 else f"the first at step {first:,}, the last at step {last:,}"
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    reasons = (
        [f"not finite: the gradient{'s' if len(names) > 1 else ''} of {', '.join(names[:3])}{more}"] if names else []
    )
    what = "; ".join([*reasons, *facts.reasons[:3]])
    return ". ".join([f"{words}{count:,} ({when}); {what}", *_untrained(facts), *missing])


def _untrained(facts: GuardFacts) -> list[str]:
    """A sentence if no step was applied, or none since the first that was skipped."""
    if facts.not_guarded:  # their steps were applied
        return []
    if facts.skipped == facts.checked:
        return ["No step was applied: nothing was trained, and the weights are those from before the first step"]
    first = facts.checked - facts.skipped
    if facts.skipped > 1 and (facts.first, facts.last) == (first, facts.checked - 1):
        return [f"No step was applied after step {first - 1:,}: nothing was trained since"]
    return []


def _world_size() -> int:
    """The number of processes that may train together, as far as this can be known."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    words = (os.environ.get(name, "") for name in ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"))
    return max((int(word) for word in words if word.isdigit()), default=1)
