"""`surefoot run --guard`: an optimizer step whose gradients are not finite is left out.

The guard stands around each optimizer's `step`, inside torch's own step hooks: whoever calls `step` (the script, a
`GradScaler`, a trainer with a closure) goes through it, after every hook that may still change the gradients. There are
three ways to leave a step out; each keeps parameters, moments and step counts bitwise as they were:

- `step` is not called at all. On a GPU the host must know the answer first: one scalar sync per step.
- A fused Adam, AdamW, SGD or Adagrad on CUDA is given the answer as `found_inf`, on the device: no sync. The host
  learns of it a few steps later.
- A closure computes the gradients inside the step. torch's own optimizers call it once, before anything else, so the
  guard calls it and hands on the loss. L-BFGS, and any optimizer that is not torch's, may move the parameters before or
  between evaluations: parameters and state are copied, and put back if the first evaluation had a gradient that is not
  finite, or if the parameters are not finite at the end.

An overflow that a `GradScaler` has found is left to the scaler. Not guarded, with one line on stderr: optimizers under
several ranks whose gradients are not known to be equal on all of them (all but `DistributedDataParallel`), since a step
must be left out on every rank or on none; steps inside a CUDA graph capture or a dispatch mode. A step that
`torch.compile` has compiled is not seen.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer

from surefoot.act.apply import can_fold, lacks_momentum
from surefoot.act.closure import ClosureRefused, StepCopy
from surefoot.act.optimizer_settings import look_at_settings
from surefoot.core.device import begin_reading
from surefoot.observe.tensors import TensorMeter
from surefoot.record.facts import GuardFacts, StepSkippedEvent
from surefoot.types import NamedParameter
from surefoot.watch.messages import say
from surefoot.watch.script_hooks import WithoutHooks, is_calm

if TYPE_CHECKING:
    from collections.abc import Callable

    from surefoot.core.device import AsyncCopy
    from surefoot.types import OptimizerSetting
    from surefoot.watch.context import WatchContext
    from surefoot.watch.patches.hooks import Hooks
    from surefoot.watch.step_observer import StepObserver

STEPS_LATER = 8
"""So many steps after a folded step the host reads whether it was left out; by then the number has arrived."""
MOST_NAMES = 20
WHY_STEP = "puts the guard around the `step` of each optimizer class, inside torch's own step hooks"
WHY_REPLICAS = "which models are replicas, whose ranks must agree before a step is left out"


class StepGuard:
    """Judges the gradients of every optimizer step, and applies the step or leaves it out."""

    def __init__(self, context: WatchContext, steps: StepObserver) -> None:
        self._state, self._safely, self._registry = context.state, context.probes.safely, context.registry
        self._steps = steps
        self._meters: weakref.WeakKeyDictionary[Optimizer, TensorMeter] = weakref.WeakKeyDictionary()
        self._inside: set[int] = set()
        """Optimizers that are in a step: a subclass may call the `step` of its base."""
        self._replicas: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        self._known_replicated: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._arriving: deque[tuple[int, weakref.ref[Optimizer], list[int], AsyncCopy]] = deque()
        self.checked = 0
        self.left_out = 0
        self.first: int | None = None
        """The first step that was left out, and the last."""
        self.last: int | None = None
        self.tensors: dict[str, None] = {}
        """The parameters whose gradients were the reason, in the order they were met."""
        self.reasons: dict[str, None] = {}
        """Other reasons, such as a learning rate that is not finite."""
        self.unguarded: dict[str, str] = {}
        """What is not guarded, and why."""

    def install(self, wrapping: Hooks) -> None:
        """Stand around the `step` of every optimizer class. Called once, before any optimizer is made."""
        hook = Optimizer.profile_hook_step

        @functools.wraps(hook)
        def profile_hook_step(step: Callable[..., Any]) -> Callable[..., Any]:
            return hook(self._around(step))

        Optimizer.profile_hook_step = staticmethod(profile_hook_step)  # type: ignore[method-assign,assignment]
        wrapping.after(
            DistributedDataParallel,
            "__init__",
            "replicas",
            lambda _, args, __: self._replicas.add(args[0]),
            WHY_REPLICAS,
        )

    def _around(self, step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def guarded(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or id(optimizer) in self._inside or not self._state.active:
                return step(optimizer, *args, **kwargs)
            self._inside.add(id(optimizer))
            try:
                return self._step(step, optimizer, args, kwargs)
            finally:
                self._inside.discard(id(optimizer))

        return guarded

    # ---- one step -------------------------------------------------------------------------------------------------

    def _step(self, step: Callable[..., Any], optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        why_not = self._why_not(optimizer)
        if why_not:
            self._give_up(optimizer, why_not)
            return step(optimizer, *args, **kwargs)
        closure = args[0] if args else kwargs.get("closure")
        if not callable(closure):
            return self._judge_and_apply(optimizer, lambda: step(optimizer, *args, **kwargs), None)

        def step_with(closure: Callable[[], Any]) -> Any:
            if args:
                return step(optimizer, closure, *args[1:], **kwargs)
            return step(optimizer, **{**kwargs, "closure": closure})

        if not _calls_closure_first(step, optimizer):
            return self._step_with_copy(optimizer, step_with, closure)
        with torch.enable_grad():
            loss = closure()
        return self._judge_and_apply(optimizer, lambda: step_with(lambda: loss), loss)

    def _judge_and_apply(self, optimizer: Optimizer, apply: Callable[[], Any], otherwise: Any) -> Any:
        """Apply the step if the gradients as they are now are finite; returns what it returns, or `otherwise`."""
        nonfinite = self._measure(optimizer)
        if nonfinite is None:
            return apply()
        self.checked += 1
        folds = _folds(optimizer, nonfinite)
        settings = look_at_settings(optimizer, nonfinite.device, folds)
        if settings.broken:
            self._leave_out(optimizer, nonfinite, settings.broken)
            return otherwise
        if folds:
            return self._folded(optimizer, apply, nonfinite, settings.values)
        if not _is_any(nonfinite) or _is_any(getattr(optimizer, "found_inf", None)):
            return apply()
        self._leave_out(optimizer, nonfinite)
        return otherwise

    def _folded(
        self, optimizer: Any, apply: Callable[[], Any], nonfinite: Tensor, settings: Tensor | None = None
    ) -> Any:
        """Let the fused kernel decide; what a scaler has found already is not ours.

        `settings` are those of the optimizer that are on the device.
        """
        found = getattr(optimizer, "found_inf", None)
        with WithoutHooks():
            if settings is not None:
                nonfinite = torch.cat([nonfinite, (~torch.isfinite(settings)).to(nonfinite)])
            ours = nonfinite if found is None else nonfinite * (found == 0)
            skip = (nonfinite.sum() > 0).to(torch.float32)
            both = skip if found is None else torch.maximum(skip, found.to(torch.float32))
            reading = begin_reading(ours)
        optimizer.found_inf = both
        try:
            result = apply()
        finally:
            if found is None:
                del optimizer.found_inf
            else:
                optimizer.found_inf = found
        self._safely("left-out steps", self._steps.judged_on_device, optimizer, ours)
        positions = [i for i, parameter in enumerate(_parameters(optimizer)) if parameter.grad is not None]
        self._arriving.append((self._state.steps, weakref.ref(optimizer), positions, reading))
        while len(self._arriving) > STEPS_LATER:
            self._read_oldest()
        return result

    def _step_with_copy(self, optimizer: Optimizer, step_with: Callable[[Any], Any], closure: Callable[[], Any]) -> Any:
        """For optimizers that may move the parameters before or between evaluations of the closure."""
        before = StepCopy([NamedParameter("", each) for each in _parameters(optimizer)], optimizer)
        was_broken = self._is_broken(optimizer)
        first: list[Any] = []
        """The loss of the first evaluation, and what is not finite in its gradients."""

        def judged() -> Any:
            loss = closure()
            if not first:
                first.extend((loss, self._measure(optimizer)))
                if _is_any(first[1]):
                    raise ClosureRefused
            return loss

        try:
            result = step_with(judged)
        except ClosureRefused:
            result = first[0]
        if not first or first[1] is None:
            return result
        self.checked += 1
        if _is_any(first[1]) or (self._is_broken(optimizer) and not was_broken):
            before.restore()
            self._leave_out(optimizer, first[1])
            return first[0]
        return result

    def _measure(self, optimizer: Optimizer) -> Tensor | None:
        """How many entries of each gradient are not finite, on the gradients' device; `None` if there is none."""
        with WithoutHooks():
            gradients = [each.grad for each in _parameters(optimizer) if each.grad is not None]
        if not gradients:
            return None
        return self._count(optimizer, gradients)

    def _is_broken(self, optimizer: Optimizer) -> bool:
        with WithoutHooks():
            able = [p.detach() for p in _parameters(optimizer) if p.is_floating_point() or p.is_complex()]
        return bool(able) and _is_any(self._count(optimizer, able))

    def _count(self, optimizer: Optimizer, tensors: list[Tensor]) -> Tensor | None:
        try:
            with WithoutHooks():
                meter = self._meters.setdefault(optimizer, TensorMeter())
                nonfinite = meter.measure(tensors).nonfinite
        except Exception as error:  # a kind of tensor nobody has thought of
            self._give_up(optimizer, " ".join(f"{type(error).__name__}: {error}".split())[:200])
            return None
        return nonfinite

    # ---- what is not guarded --------------------------------------------------------------------------------------

    def _why_not(self, optimizer: Optimizer) -> str:
        """Why a step of this optimizer cannot be guarded now; empty if it can."""
        if not is_calm():
            return "it steps inside a dispatch mode or a trace"
        parameters = _parameters(optimizer)
        if any(each.is_cuda for each in parameters) and torch.cuda.is_current_stream_capturing():
            return "its step is captured in a CUDA graph"
        if _world_size() > 1 and not self._is_replicated(optimizer, parameters):
            return (
                "its gradients may differ between ranks, and a step must be left out on all of them or on none. "
                "DistributedDataParallel is guarded; for sharded models use TrainingStabilizer"
            )
        return ""

    def _is_replicated(self, optimizer: Optimizer, parameters: list[Tensor]) -> bool:
        """Whether `DistributedDataParallel` makes every gradient the same on all ranks."""
        if self._known_replicated.get(optimizer) == len(parameters):
            return True
        averaged = {
            id(parameter)
            for replica in self._replicas
            for name, parameter in replica.module.named_parameters()
            if name not in replica.parameters_to_ignore
        }
        found = all(id(each) in averaged and not hasattr(each, "to_local") for each in parameters if each.requires_grad)
        if found:
            self._known_replicated[optimizer] = len(parameters)
        return found

    def _give_up(self, optimizer: Optimizer, why: str) -> None:
        name = self._safely("left-out steps", self._steps.name_of_optimizer, optimizer) or type(optimizer).__name__
        if name not in self.unguarded:
            self.unguarded[name] = why
            say(f"surefoot: --guard does not guard {name}: {why}")

    # ---- what was left out ----------------------------------------------------------------------------------------

    def _leave_out(self, optimizer: Optimizer, nonfinite: Tensor, settings: tuple[OptimizerSetting, ...] = ()) -> None:
        """A step was not applied; a look at the numbers is free by now."""
        with WithoutHooks():
            held = [each for each in _parameters(optimizer) if each.grad is not None]
        self._note(optimizer, self._state.steps, held, nonfinite.tolist(), settings)
        self._safely("left-out steps", self._steps.skipped, optimizer)

    def _read_oldest(self) -> None:
        step, ref, positions, reading = self._arriving.popleft()
        counts, optimizer = reading.wait().tolist(), ref()
        if any(counts):
            parameters = _parameters(optimizer) if optimizer is not None else []
            held = [parameters[i] for i in positions if i < len(parameters)]
            self._note(optimizer, step, held, counts)

    def _note(
        self,
        optimizer: Optimizer | None,
        step: int,
        parameters: list[Tensor],
        counts: list[float],
        settings: tuple[OptimizerSetting, ...] = (),
    ) -> None:
        bad = [each for each, count in zip(parameters, counts, strict=False) if count]
        names = self._safely("left-out steps", self._names_of, bad[:MOST_NAMES]) or []
        self.left_out += 1
        self.first = step if self.first is None else min(step, self.first)
        self.last = step if self.last is None else max(step, self.last)
        if len(self.tensors) < MOST_NAMES:
            self.tensors |= dict.fromkeys(names)
        on_device = bool(parameters) and any(counts[len(parameters) :])
        self.reasons |= dict.fromkeys(map(str, settings))
        if on_device:
            self.reasons["a setting of the optimizer that is on the device is not finite"] = None
        elif bad and not names:
            self.reasons["gradients that are not finite"] = None
        elif not bad and not settings:
            self.reasons["the step ended on parameters that are not finite"] = None
        facts = StepSkippedEvent(step=step, parameters=names, of=len(bad), settings=[str(each) for each in settings])
        self._safely("left-out steps", self._steps.skip_known, optimizer, facts, self.left_out)

    def _names_of(self, tensors: list[Tensor]) -> list[str]:
        return [self._registry.label(self._registry.add(tensor)) for tensor in tensors]

    def read(self) -> None:
        """Read the answers that are still on a device. Waits for it."""
        while self._arriving:
            self._read_oldest()

    def as_facts(self) -> GuardFacts:
        """What the guard did."""
        self.read()
        return GuardFacts(
            checked=self.checked,
            skipped=self.left_out,
            first=self.first,
            last=self.last,
            parameters=list(self.tensors)[:MOST_NAMES],
            reasons=list(self.reasons)[:MOST_NAMES],
            not_guarded=self.unguarded,
        )


def in_words(facts: GuardFacts) -> str:
    """What the guard did, in one sentence."""
    checked, count = facts.checked, facts.skipped
    missing = [f"{name} was not guarded: {why}" for name, why in facts.not_guarded.items()]
    if not checked:
        return ". ".join(["--guard checked no step" if missing else "--guard saw no optimizer step to check", *missing])
    words = f"--guard checked {checked:,} step{'s' if checked != 1 else ''} and left out "
    if not count:
        return ". ".join([f"{words}none", *missing])
    first, last, names = facts.first, facts.last, facts.parameters
    when = f"step {first:,}" if count == 1 else f"the first at step {first:,}, the last at step {last:,}"
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    reasons = (
        [f"not finite: the gradient{'s' if len(names) > 1 else ''} of {', '.join(names[:3])}{more}"] if names else []
    )
    what = "; ".join([*reasons, *facts.reasons[:3]])
    return ". ".join([f"{words}{count:,} ({when}); {what}", *missing])


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _is_any(counts: Tensor | None) -> bool:
    return counts is not None and bool((counts > 0).any())


def _calls_closure_first(step: Callable[..., Any], optimizer: Optimizer) -> bool:
    """Whether a `step` is known to call its closure once, before it touches anything."""
    return step.__module__.startswith("torch.optim.") and not isinstance(optimizer, LBFGS)


def _folds(optimizer: Optimizer, nonfinite: Tensor) -> bool:
    """Whether the optimizer's kernel takes the answer on the device."""
    return nonfinite.is_cuda and can_fold(optimizer) and not lacks_momentum(optimizer)


def _world_size() -> int:
    """How many processes may train together, as far as can be known."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    words = (os.environ.get(name, "") for name in ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"))
    return max((int(word) for word in words if word.isdigit()), default=1)
