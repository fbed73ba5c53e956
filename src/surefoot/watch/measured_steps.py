"""How much of a step is measured: everything, only its gradient norm, or nothing.

On a device, `measuring_budget` decides which steps are measured. On a CPU, every step is, and the norm of its gradients
is known before it is applied. If the norm, the loss and the settings are finite, the step is healthy: further
measurements and decisions of the guard would change nothing that is recorded, and are omitted. Otherwise the step is
measured and decided like every guarded step, in time for an incident. The same holds for the first steps, for sampled
ones, and for those of an experiment, of a closure, or with a gradient scaler.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from surefoot.act.apply import NOTHING_FOUND, look_at_settings
from surefoot.core.device import has_streams
from surefoot.core.without_hooks import WithoutHooks, runs_eagerly
from surefoot.guard.step_hooks import StepHooks
from surefoot.observe.tensors import finite_norm

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim import Optimizer

    from surefoot.guard.step_decision import StepDecision
    from surefoot.watch.accumulated_loss import StepLosses
    from surefoot.watch.context import WatchContext
    from surefoot.watch.optimizer_record import OptimizerRecord


FIRST_STEPS = 128
"""The number of first steps of each optimizer that always go through the guard, so that problems show early."""


class MeasuredSteps:
    """Decides how much of each step is measured, for optimizers whose steps are observed but not skipped."""

    def __init__(
        self, context: WatchContext, probe: str, on_measure: Callable[[OptimizerRecord, Optimizer], None]
    ) -> None:
        """`on_measure` is called before a step that might have been healthy is measured."""
        self._state, self._probes, self._budget = context.state, context.probes, context.measuring
        self._probe, self._on_measure = probe, on_measure
        self._on_device: set[int] = set()
        """The numbers of optimizers with parameters on a device, for which not all steps are measured."""
        self._on_host: set[int] = set()
        """The numbers of optimizers whose parameters are all on the CPU."""
        self.changes: list[Callable[[Optimizer, StepDecision], None]] = []
        """The changes of an experiment to each step, made after its gradients are measured."""

    def add(self, number: int, optimizer: Optimizer) -> None:
        """Observe the steps of an optimizer from now on."""
        devices = {each.device for group in optimizer.param_groups for each in group["params"]}
        if any(map(has_streams, devices)):
            self._on_device.add(number)
            self._state.on_device = True
        elif {device.type for device in devices} == {"cpu"}:
            self._on_host.add(number)

    def measures(self, number: int) -> bool:
        """Whether the gradients of the current step are measured at all, by the number of its optimizer."""
        if self._budget.measures or number not in self._on_device:
            return True
        return self._state.sampled is not None or bool(self.changes)

    def may_be_healthy(self, record: OptimizerRecord, losses: StepLosses) -> bool:
        """Whether the current step needs only its gradient norm, if that is finite."""
        state = self._state
        if record.number not in self._on_host or record.series.count < FIRST_STEPS or state.sampled is not None:
            return False
        if self.changes or state.scaler.enabled:
            return False
        loss = losses.loss_so_far()
        return loss is None or (isinstance(loss, float) and math.isfinite(loss))

    def run(self, record: OptimizerRecord, hook: Callable[..., Any], *args: Any) -> Any:
        """Run a hook of an attachment if its step is measured. A hook that fails never ends the script."""
        which = getattr(hook, "__func__", None)
        if which is StepHooks.before:
            if not self.measures(record.number):
                return None
            if record.may_be_healthy:
                return self._probes.safely(self._probe, self._run_unless_healthy, record, hook, *args)
        elif which is StepHooks.after and not hook.__self__.is_under_way:  # type: ignore[attr-defined]
            return None
        began = time.perf_counter()
        result = self._probes.safely(self._probe, hook, *args)
        if record.number in self._on_device:
            self._budget.spend(time.perf_counter() - began)
        return result

    def _run_unless_healthy(
        self, record: OptimizerRecord, hook: Callable[..., Any], optimizer: Optimizer, *args: Any
    ) -> Any:
        """Run the hook before a step, unless the step is healthy. In that case the hook after it does nothing."""
        record.may_be_healthy = False
        norm = healthy_norm(optimizer) if runs_eagerly() else None
        if norm is None:
            self._on_measure(record, optimizer)
            return hook(optimizer, *args)
        record.row["grad_norm"] = norm
        return None


def healthy_norm(optimizer: Optimizer) -> float | None:
    """The norm of the gradients that a step on the CPU is about to apply; `None` if it must be measured in full."""
    if getattr(optimizer, "found_inf", None) is not None or getattr(optimizer, "grad_scale", None) is not None:
        return None
    with WithoutHooks():
        gradients = [
            gradient
            for group in optimizer.param_groups
            for parameter in group["params"]
            if (gradient := parameter.grad) is not None
        ]
        if not gradients or look_at_settings(optimizer, gradients[0].device, on_device=False) is not NOTHING_FOUND:
            return None
        return finite_norm(gradients)
