"""One run of `surefoot bisect`, inside its process: applies a change, counts its effects, and ends the run.

The run ends after the ordered number of steps, after the ordered time, or when many consecutive losses are not finite.
It ends at a step boundary with a `SystemExit`: the script's `finally` blocks run, nothing after its loop does. The
facts are written first. A script that does not end is killed a few seconds later, and so is one whose `surefoot bisect`
has ended.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from surefoot.record.facts import ExperimentDevices, ExperimentFacts
from surefoot.watch.messages import print_line
from surefoot.watch.patches.hooks import Hooks

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from surefoot.experiments.changes.guard import Guard
    from surefoot.experiments.changes.run_order import RunOrder
    from surefoot.guard.step_decision import StepDecision
    from surefoot.watch.watcher import Watcher

GRACE_SECONDS = 10.0
"""How long a script may take to end after the `SystemExit`."""
BROKEN_STEPS = 25
"""After this many consecutive non-finite losses, the run is not expected to recover."""
ChangeArguments: TypeAlias = Callable[
    [tuple[Any, ...], Mapping[str, Any]], tuple[tuple[Any, ...], Mapping[str, Any]] | None
]
"""Returns other positional and keyword arguments of a call; `None` leaves them as they are."""
ChangeResult: TypeAlias = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any]
"""Given the result and the arguments of a call, returns another result; `None` leaves it as it is."""


class Enough(SystemExit):
    """Raised when the run can end."""


class Experiment:
    """The order of this run, and what the run recorded."""

    def __init__(self, watcher: Watcher, order: RunOrder, files: Guard) -> None:
        self.watcher, self.order, self._files = watcher, order, files
        self.acted = 0
        """How often the change took effect."""
        self.patience: int | None = None
        """If the change has had no effect after this many steps, it does not apply. `None`: it may take effect at any
        time.
        """
        self.notes: list[str] = []
        """What the change could not do."""
        self.problem = ""
        """Why the change was abandoned."""
        self.skipped: list[int] = []
        """Steps that were skipped on purpose."""
        self.first_step = 0
        """The number of steps before the experiment: those before the captured step of an incident, otherwise 0."""
        self.ended = ""
        self.has_closure = False
        """Whether the optimizer that is about to step computes its gradients inside the step."""
        self._seen = ExperimentDevices(devices=[], has_state=False, dtypes=[])
        self._add_facts: list[Callable[[ExperimentFacts], ExperimentFacts]] = []
        self._began = time.monotonic()
        self._before: list[Callable[[Optimizer], None]] = []
        self._after: list[Callable[[Optimizer], None]] = []
        self.wrapping = Hooks(watcher.probes)
        """For changes that wrap a call."""
        self.wrapping.around(torch.autograd, "backward", self._around_backward)

    # Used by the changes

    def before_step(self, call: Callable[[Optimizer], None]) -> None:
        """Call a function before each step. To change gradients, use `change_gradients`."""
        self._before.append(call)

    def change_gradients(self, call: Callable[[Optimizer, StepDecision], None]) -> None:
        """Call a function that changes gradients at each step, after the watcher has measured them."""

        def change(optimizer: Optimizer, decision: StepDecision) -> None:
            if self.watcher.probes.here():
                self.safely(call, optimizer, decision)

        self.watcher.steps.guard.add_change(change)

    def after_step(self, call: Callable[[Optimizer], None]) -> None:
        """Call a function after each step, after the watcher has read the result."""
        self._after.append(call)

    def add_facts(self, call: Callable[[ExperimentFacts], ExperimentFacts]) -> None:
        """Register a function that completes the facts each time they are written."""
        self._add_facts.append(call)

    def number(self, optimizer: Optimizer) -> int:
        """The step of the experiment that an optimizer is in, counted from 0."""
        return self.watcher.steps.record_of(optimizer).series.count - self.first_step

    def alter(self, owner: Any, name: str, change: ChangeArguments) -> None:
        """Let `change(args, kwargs)` return other arguments for a function; `None` keeps them."""

        def call(original: Any, args: Any, kwargs: Any) -> Any:
            args, kwargs = self.safely(change, args, kwargs) or (args, kwargs)
            return original(*args, **kwargs)

        self.wrapping.around(owner, name, call)

    def replace(self, owner: Any, name: str, change: ChangeResult) -> None:
        """Let `change(result, args, kwargs)` return another result for a function."""

        def call(original: Any, args: Any, kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            changed = self.safely(change, result, args, kwargs)
            return result if changed is None else changed

        self.wrapping.around(owner, name, call)

    def safely(self, call: Callable[..., Any], *args: Any) -> Any:
        """Apply a part of the change. If it raises, the change is abandoned and the script continues without it."""
        if self.problem or not self.watcher.state.active:
            return None
        try:
            return call(*args)
        except Exception as error:
            self.problem = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            print_line(f"surefoot: could not make the change {self.order.get('change')!r}: {self.problem}")
            return None

    # The end of the run

    def follow(self) -> None:
        """Start to follow the steps. Called after the watcher has installed its own hooks."""

        def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if self.watcher.probes.here():
                if not self.watcher.state.steps:
                    self._seen = self.safely(_seen_in, optimizer, self._seen) or self._seen
                self.has_closure = callable(args[1] if len(args) > 1 else kwargs.get("closure"))
                for call in self._before:
                    self.safely(call, optimizer)

        def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if self.watcher.probes.here():
                if not self._seen.has_state:
                    self._seen = replace(self._seen, has_state=bool(self.safely(_has_state, optimizer)))
                for call in self._after:
                    self.safely(call, optimizer)
                self._end_if_due()

        register_optimizer_step_pre_hook(before)
        register_optimizer_step_post_hook(after)

    def _around_backward(self, original: Any, args: Any, kwargs: Any) -> Any:
        if self.watcher.probes.here():
            self._end_if_due()
        return original(*args, **kwargs)

    def _end_if_due(self) -> None:
        why = self._due()
        if why:
            self.end(why)

    def _due(self) -> str:
        order, state = self.order, self.watcher.state
        done = max(state.steps, state.backwards if not self.watcher.optimizers.all else 0)
        # If a scaler skips every step, backward passes are not followed by steps.
        done = max(done, state.backwards // 4 if not state.steps else 0)
        if order.get("parent") and os.getppid() != order["parent"]:
            os.kill(os.getpid(), signal.SIGKILL)
        if order.get("steps") and done >= order["steps"]:
            return "steps"
        if order.get("seconds") and time.monotonic() - self._began > order["seconds"]:
            return "time"
        if self.problem or (self.patience is not None and done >= self.patience and not self.acted):
            return "does not apply"
        if _is_broken(self.watcher):
            return "non-finite"
        return ""

    def end(self, why: str) -> None:
        """Write the facts and end the run."""
        if not self.ended:
            self.ended = why
            self.watcher.probes.safely("saving", self.watcher.saver.save, True)
            timer = threading.Timer(GRACE_SECONDS, os.kill, (os.getpid(), signal.SIGKILL))
            timer.daemon = True
            timer.start()
        raise Enough(0)

    def as_facts(self) -> ExperimentFacts:
        """The effect of the change."""
        facts = ExperimentFacts(
            change=self.order.get("change"),
            acted=self.acted,
            problem=self.problem,
            notes=list(dict.fromkeys(self.notes)),
            skipped=self.skipped,
            refused=self._files.refused,
            outside=self._files.outside,
            ended=self.ended,
            seen=self._seen,
        )
        for call in self._add_facts:
            facts = call(facts)
        return facts


def _is_broken(watcher: Watcher) -> bool:
    """Whether so many consecutive losses are not finite that the run will not recover."""
    held = max(watcher.optimizers.all, key=lambda item: item.series.count, default=None)
    rows = (held.series if held is not None and held.series.count else watcher.backward.series).rows
    last = [row.get("loss") for row in rows[-BROKEN_STEPS:]]
    return len(last) == BROKEN_STEPS and all(isinstance(v, float) and not math.isfinite(v) for v in last)


def _seen_in(optimizer: Optimizer, seen: ExperimentDevices) -> ExperimentDevices:
    """The devices and dtypes recorded so far, with those of an optimizer's parameters."""
    tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    devices = {*seen.devices, *(tensor.device.type for tensor in tensors)}
    dtypes = {*seen.dtypes, *(str(tensor.dtype) for tensor in tensors)}
    return replace(seen, devices=sorted(devices), dtypes=sorted(dtypes))


def _has_state(optimizer: Optimizer) -> bool:
    """Whether an optimizer keeps tensors, such as moments."""
    held = [value for state in optimizer.state.values() for value in state.values()]
    return any(isinstance(value, Tensor) and value.dim() for value in held)
