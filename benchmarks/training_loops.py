"""One training, two loops: the bare one that anybody would write, and the same one under `TrainingStabilizer`.

A training is a list of `Learner`s that take turns, one in most cases and two for a GAN. Both loops draw the same
batches and the same random numbers, so without a clipper their parameters must agree bit for bit. A `Fault` may tamper
with a single step: its batch, its loss, its gradients or its learning rate.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import surefoot as sf

Batch = tuple[Tensor, ...]


@dataclass
class Learner:
    """A model, its optimizer, where its batches come from and what its loss is."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: Callable[[], Batch]
    loss: Callable[..., Tensor]
    """Takes what `batch` returned, unpacked."""
    scheduler: Any = None
    max_norm: float | None = None
    precision: str | None = None
    accumulate: int = 1


Run = Callable[[int, int], "list[Learner]"]
"""Makes a training from a seed and the number of steps it will run for."""


class Fault:
    """Tampers with nothing; subclasses override what they break. `step` counts optimizer steps from 0."""

    def learner(self, step: int, learner: Learner) -> None:
        """Called before the step with everything that it trains."""

    def batch(self, step: int, batch: Batch) -> Batch:
        return batch

    def loss(self, step: int, loss: Tensor) -> Tensor:
        return loss

    def gradients(self, step: int, model: nn.Module) -> None:
        pass

    def lr_factor(self, step: int) -> float:
        return 1.0


@dataclass
class Result:
    """What a training left behind."""

    losses: list[float]
    """The first learner's loss at every step."""
    parameters: list[Tensor]
    skipped: int = 0
    skipped_at: list[int] = field(default_factory=list)
    overflows: int = 0
    alarms: Counter[str] = field(default_factory=Counter)
    """Incidents above `info` by kind, refused steps included."""
    alarmed_at: list[int] = field(default_factory=list)
    remarks: Counter[str] = field(default_factory=Counter)
    incidents: list[str] = field(default_factory=list)
    returns: int = 0
    """Returns to an earlier state."""
    returned_at: list[int] = field(default_factory=list)
    taken_back: int = 0
    """Those among them that the run undid a few steps later."""
    halted: bool = False


def train_bare(run: Run, seed: int, steps: int, fault: Fault | None = None) -> Result:
    """The loop as anybody would write it."""
    torch.manual_seed(seed)
    learners, fault, losses = run(seed, steps), fault or Fault(), []
    _let_fault_set_lr(learners, fault)
    scalers = [torch.amp.GradScaler("cpu", enabled=each.precision == "fp16") for each in learners]
    for step in range(steps):
        for learner, scaler in zip(learners, scalers, strict=True):
            optimizer, total = learner.optimizer, 0.0
            fault.learner(step, learner)
            for _ in range(learner.accumulate):
                with _autocast(learner):
                    loss = fault.loss(step, learner.loss(*fault.batch(step, learner.batch())))
                total += float(loss.detach())
                scaler.scale(loss if learner.accumulate == 1 else loss / learner.accumulate).backward()
            fault.gradients(step, learner.model)
            if learner.max_norm is not None:
                torch.nn.utils.clip_grad_norm_(learner.model.parameters(), learner.max_norm)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            if learner.scheduler is not None:
                learner.scheduler.step()
            if learner is learners[0]:
                losses.append(total / learner.accumulate)
    return Result(losses, _parameters(learners))


def train_guarded(
    run: Run,
    seed: int,
    steps: int,
    fault: Fault | None = None,
    checker: sf.StabilityChecker | None = None,
    until: float = math.inf,
) -> Result:
    """The same loop under one `TrainingStabilizer` per learner, with its default settings and recovery.

    It ends early at the time `until`.
    """
    torch.manual_seed(seed)
    learners, fault, losses = run(seed, steps), fault or Fault(), []
    _let_fault_set_lr(learners, fault)
    guards = [_stabilizer(learner, checker) for learner in learners]
    tally = _Tally()
    halted = False
    with _quiet():
        for step in range(steps):
            if time.time() > until:
                break
            try:
                for learner, guard in zip(learners, guards, strict=True):
                    fault.learner(step, learner)
                    for micro in range(learner.accumulate):
                        with guard.autocast():
                            loss = fault.loss(step, learner.loss(*fault.batch(step, learner.batch())))
                        guard.backward(loss)
                        if micro == learner.accumulate - 1:
                            fault.gradients(step, learner.model)
                        outcome = guard.step()
                    tally.take(guard, outcome)
                    if learner is learners[0]:
                        losses.append(float(outcome.loss or 0.0))
            except sf.TrainingHalted:
                halted = True
                break
    for guard in guards:
        tally.finish(guard)
    result = tally.result
    result.losses, result.parameters, result.halted = losses, _parameters(learners), halted
    return result


def _stabilizer(learner: Learner, checker: sf.StabilityChecker | None) -> sf.TrainingStabilizer:
    return sf.TrainingStabilizer(
        learner.model,
        learner.optimizer,
        scheduler=learner.scheduler,
        clip=None if learner.max_norm is None else sf.ClipByNorm(learner.max_norm),
        precision=learner.precision,  # type: ignore[arg-type]
        accumulate=learner.accumulate,
        checker=checker,
        recovery=sf.TrainingRecovery(),
    )


class _Tally:
    """Counts incidents as they come: a stabilizer keeps only the last 200."""

    def __init__(self) -> None:
        self.result = Result([], [])
        self._seen: dict[int, int] = {}
        self._unsettled: dict[int, sf.Incident] = {}

    def take(self, guard: sf.TrainingStabilizer, outcome: sf.Outcome) -> None:
        if outcome.skipped and not outcome.record.overflow:
            self.result.skipped_at.append(outcome.step)
        self._settle(guard)
        total = sum(guard._run.guard.history.by_kind.values())
        fresh = total - self._seen.get(id(guard), 0)
        self._seen[id(guard)] = total
        if not fresh:
            return
        for incident in guard.incidents[-fresh:]:
            self.result.incidents.append(str(incident))
            if incident.action in ("roll_back", "reset_moments"):
                self.result.returns += 1
                self.result.returned_at.append(incident.step)
            self.result.taken_back += incident.action == "take_back"
            if incident.severity == "info":
                self.result.remarks[incident.kind] += 1
            else:
                self.result.alarms[incident.kind] += 1
                self.result.alarmed_at.append(incident.step)
                self._unsettled[id(guard)] = incident

    def _settle(self, guard: sf.TrainingStabilizer) -> None:
        """A refused step is reported when the next one shows whether it was the first of a new level: an info then."""
        incident = self._unsettled.pop(id(guard), None)
        if incident is not None and incident.action == "skip" and all(each is not incident for each in guard.incidents):
            self.result.alarms -= Counter({incident.kind: 1})
            self.result.alarmed_at.remove(incident.step)
            self.result.remarks[incident.kind] += 1

    def finish(self, guard: sf.TrainingStabilizer) -> None:
        self.result.overflows += guard._run.guard.history.counts["overflows"]
        self.result.skipped += guard._run.guard.history.counts["skipped"] - guard._run.guard.history.counts["overflows"]


def _autocast(learner: Learner) -> Any:
    return torch.autocast("cpu", dtype=torch.float16) if learner.precision == "fp16" else nullcontext()


class _WrongSchedule:
    """The schedule of a learner, if it has one, with rates that a fault multiplies."""

    def __init__(self, learner: Learner, fault: Fault) -> None:
        self.optimizer, self._own, self._fault, self._steps = learner.optimizer, learner.scheduler, fault, 0
        self._right = [group["lr"] for group in learner.optimizer.param_groups]
        self._set(fault.lr_factor(0))

    def step(self) -> None:
        self._set(1.0)
        if self._own is not None:
            self._own.step()
        self._right = [group["lr"] for group in self.optimizer.param_groups]
        self._steps += 1
        self._set(self._fault.lr_factor(self._steps))

    def _set(self, factor: float) -> None:
        for group, lr in zip(self.optimizer.param_groups, self._right, strict=True):
            group["lr"] = lr if factor == 1.0 else lr * factor

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps, "own": None if self._own is None else self._own.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._steps = state["steps"]
        if self._own is not None:
            self._own.load_state_dict(state["own"])


def _let_fault_set_lr(learners: list[Learner], fault: Fault) -> None:
    if type(fault).lr_factor is not Fault.lr_factor:
        for learner in learners:
            learner.scheduler = _WrongSchedule(learner, fault)


@contextmanager
def _quiet() -> Iterator[None]:
    """The table tells what happened; the log would tell it twice."""
    logger = logging.getLogger("surefoot")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logger.setLevel(level)


def _parameters(learners: list[Learner]) -> list[Tensor]:
    tensors = [[*each.model.parameters(), *each.model.buffers()] for each in learners]
    return [tensor.detach().clone() for tensor in itertools.chain.from_iterable(tensors)]


def same_bits(left: Result, right: Result) -> bool:
    """Whether two trainings ended on the same parameters, bit for bit."""
    pairs = zip(left.parameters, right.parameters, strict=True)
    return all(torch.equal(a, b) for a, b in pairs)
