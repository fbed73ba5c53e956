"""Watches one training from inside its process: what `surefoot run` observes, for a trainer's callback.

`TrainingWatch.begin` installs the same observers and probes that `surefoot run` installs, although the script has been
running for a while, and `end` removes them: functions of torch have their own code again, and nothing of the script is
held. Earlier facts are read from existing objects: the optimizers, their schedules and their parameters, and whether
saved tensors are being hooked. Seeds and loaded files cannot be read and are left out; the scope of the facts says so.

Nothing is observed, and one line in the log gives the reason, if this could change the run or would be incomplete:

- `surefoot run` already watches the process;
- torch has compiled something before, or a model is compiled. Compiled code depends on the hooks and modes that are
  active during compilation, and code that was compiled elsewhere cannot be found;
- a method of torch's classes that surefoot calls was replaced before: its calls would go through the replacement.

Left out: events between the ranks of a distributed run, which the guard watches itself; the copy of the first bad step,
which `incidents=` keeps; and facts of a process that is killed, whose diagnosis rests on its run log.
"""

from __future__ import annotations

import logging
import sys
import weakref
from dataclasses import replace
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch

from surefoot.core.device import has_streams
from surefoot.record.facts import TRAINING
from surefoot.watch import patches
from surefoot.watch.context import SchedulerRecord, WatchOptions
from surefoot.watch.crash import describe_end, find_bad_loss
from surefoot.watch.module_hooks import COMPILED
from surefoot.watch.originals import replaced_methods
from surefoot.watch.patches import indexing
from surefoot.watch.script_hooks import script_hooks
from surefoot.watch.watcher import Watcher

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import nn
    from torch.optim.optimizer import Optimizer

    from surefoot.guard.attach import Attachment
    from surefoot.guard.step_decision import StepDecision
    from surefoot.record.facts import RunFacts
    from surefoot.types import StepRecord
    from surefoot.watch.optimizer_record import OptimizerRecord
    from surefoot.watch.patches.hooks import Hooks

logger = logging.getLogger("surefoot")


class TrainingWatch:
    """The probes of one training, from `begin` to `end`."""

    def __init__(self, watcher: Watcher, hooks: Hooks, script_hooks_before: tuple[bool, bool]) -> None:
        self._watcher, self._hooks = watcher, hooks
        self._script_hooks_before = script_hooks_before
        self._began_at = 0
        self._records: list[OptimizerRecord] = []
        """The records of the guarded optimizers, in the order of their guards."""

    @staticmethod
    def begin(models: Sequence[nn.Module]) -> TrainingWatch | None:
        """Observe this process from now on; `None` if that could change the run or would be incomplete."""
        if patches.installed:
            return None  # `surefoot run` observes more
        reason = _why_not(models)
        if reason:
            logger.info("surefoot: sampled steps are not observed in depth: %s.", reason)
            return None
        before = script_hooks.gradients, script_hooks.saved
        script_hooks.gradients, script_hooks.saved = False, _saves_with_hooks()
        try:
            watcher = Watcher(WatchOptions())
            hooks = patches.install(watcher)
        except Exception as error:
            script_hooks.gradients, script_hooks.saved = before
            logger.warning("surefoot: this torch cannot be observed in depth: %s: %s", type(error).__name__, error)
            return None
        return TrainingWatch(watcher, hooks, before)

    def add(self, optimizers: Iterable[Optimizer], schedulers: Iterable[Any] = (), began_at: int = 0) -> None:
        """Observe optimizers and schedules that may already exist, from a step of the guard on."""
        self._began_at = began_at
        self._watcher.probes.safely("optimizers", self._add, list(optimizers), list(schedulers))

    def _add(self, optimizers: list[Optimizer], schedulers: list[Any]) -> None:
        known = [record.ref() for record in self._watcher.optimizers.all]
        for optimizer in optimizers:
            if all(each is not optimizer for each in known):
                self._watcher.steps.optimizer_made(optimizer)
        followed = [record.ref() for record in self._watcher.calls.schedulers]
        for scheduler in schedulers:
            if all(each is not scheduler for each in followed):
                record = SchedulerRecord(weakref.ref(scheduler), type(scheduler).__name__, "")
                self._watcher.calls.schedulers.append(record)
        parameters = [each for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]]
        if any(has_streams(each.device) for each in parameters):
            indexing.begin(self._watcher, self._hooks)

    def read_from(self, attachments: Sequence[Attachment]) -> None:
        """Do not measure the steps of optimizers that are guarded: `decided` and `stepped` pass on the numbers."""
        self._watcher.probes.safely("optimizers", self._read_from, attachments)

    def _read_from(self, attachments: Sequence[Attachment]) -> None:
        steps = self._watcher.steps
        for attachment in attachments:
            optimizer = attachment.optimizer
            if optimizer is None:
                return
            record = steps.record_of(optimizer)
            self._records.append(record)
            steps.guard.measured.add(record.number, optimizer)
            steps.guard.trainers.add(attachment, optimizer)

    def decided(self, number: int, decision: StepDecision) -> None:
        """The guard has decided on a step that is not applied yet."""
        if number < len(self._records):
            self._watcher.steps.guard.trainers.decided(self._records[number], decision)

    def stepped(self, number: int, step: StepRecord) -> None:
        """The numbers of a step have arrived at the guard."""
        if number < len(self._records):
            self._watcher.steps.guard.trainers.arrived(self._records[number], step)

    def end(self, error: BaseException | None = None) -> RunFacts | None:
        """Stop observing; returns the facts. `error` is the exception that ended the training."""
        if self._hooks not in patches.installed:
            return None
        watcher, safely = self._watcher, self._watcher.probes.safely
        facts: RunFacts | None = None
        try:
            crash = safely("crash", describe_end, error, watcher.indexed_calls)
            bad = safely("autopsy", find_bad_loss, error, None, watcher)
            facts = watcher.as_facts()
            facts = replace(facts, scope=TRAINING, seeds=None, began_at=self._began_at, crash=crash, discarded_loss=bad)
        except Exception as problem:
            logger.warning("surefoot: what was observed is lost: %s: %s", type(problem).__name__, problem)
        finally:
            watcher.state.stop_sampling()
            watcher.steps.guard.detach()
            patches.uninstall(watcher, self._hooks)
            script_hooks.gradients, script_hooks.saved = self._script_hooks_before
        return facts


def _why_not(models: Sequence[nn.Module]) -> str:
    """The reason why nothing may be observed; empty if there is none."""
    if _has_compiled(models):
        return "something was compiled with `torch.compile` before the training began"
    if replaced := replaced_methods():
        return f"{', '.join(replaced[:3])} of torch {'was' if len(replaced) == 1 else 'were'} replaced"
    return ""


def _has_compiled(models: Sequence[nn.Module]) -> bool:
    """Whether torch has compiled something before, or one of the models will be compiled when it is called.

    A function that was only decorated does not count: many libraries decorate some on import. If the training calls
    it, the watch uses no hooks from then on (`patches.modes`).
    """
    compiler: Any = sys.modules.get("torch._dynamo.convert_frame")
    if compiler is None:
        return False  # nothing can have been compiled
    codes = getattr(compiler, "input_codes", None)
    if codes is None or codes.seen:  # the functions that the compiler has read
        return True
    return any(_will_be_compiled(part) for model in models for part in model.modules())


def _will_be_compiled(module: nn.Module) -> bool:
    is_compiled = type(module).__name__ == COMPILED or getattr(module, "_compiled_call_impl", None) is not None
    own = [value for value in vars(module).values() if isinstance(value, FunctionType)]
    return is_compiled or any(  # Lightning replaces the methods of a compiled module
        hasattr(value, "_torchdynamo_orig_callable") and not hasattr(value, "_torchdynamo_disable") for value in own
    )


def _saves_with_hooks() -> bool:
    """Whether tensors that autograd saves currently go through hooks of the script."""
    ask = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return ask is None or ask(False) is not None
