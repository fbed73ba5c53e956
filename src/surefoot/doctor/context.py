"""Shared by the checks: the batches, how to call the model, copies on demand, the remaining time, the rehearsal.

The rehearsal is a short training run of a copy, recorded like one of `surefoot run`, so that the same rules judge it.
The copy trains at the user's rate over all batches that were taken. A rate that a schedule is still warming up counts
as its value after the warm-up, and is reached gradually. If there is no optimizer, Adam is used.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from surefoot.diagnose.engine import claims_of
from surefoot.doctor.batches import first_rows, to_device
from surefoot.doctor.checks import Check, from_finding
from surefoot.doctor.model_copy import ModelCopy, PassTrace, is_warming_up, needs_closure
from surefoot.doctor.probe_facts import REHEARSED, crash_facts
from surefoot.record.facts import PreflightFacts, RunFacts, SampledCalls
from surefoot.watch.context import WatchOptions
from surefoot.watch.user_frames import user_frame
from surefoot.watch.watcher import Watcher

if TYPE_CHECKING:
    from torch import Tensor

    from surefoot.diagnose.findings import Finding
    from surefoot.doctor.loss_of_batch import Convention

TINY_ROWS = 8
"""Rows of the batch that must be overfitted."""

PROBE_BATCHES = 4
"""Batches that the short training probes cycle through."""

_SEED = 0


@dataclass
class CheckContext:
    """Everything that a check may read. The original objects are read, never run."""

    model: nn.Module
    loss_fn: Any
    optimizer: Any
    batches: list[Any]
    """Batches of the training loader, on the host."""
    eval_batches: list[Any]
    seconds: float
    """The budget of the whole examination."""
    clip: float | None
    """The user's limit for the gradient norm, if given."""
    device: torch.device
    convention: Convention | None = None
    """How model and loss are called; `None` until a working convention is found."""
    look: PassTrace | None = None
    """A recorded pass over the first batch, before any update."""
    claims: dict[str, Finding] = field(default_factory=dict)
    """The findings of the rules of `diagnose` for that pass, by the code of the cause."""
    refusal: str = ""
    """Why the model cannot be run on a copy; empty if it can."""
    checks: list[Check] = field(default_factory=list)
    """The checks so far: a fault whose cause is already known is not attributed to another cause."""
    notes: list[str] = field(default_factory=list)
    preflight: PreflightFacts = field(default_factory=PreflightFacts)
    """What the probes have measured so far."""
    rehearsal: RunFacts | None = None
    """The facts of a short run of a copy; `None` until it has been made."""
    _last: tuple[RunFacts, PreflightFacts, dict[str, Finding]] | None = None
    """The facts that were judged last, and the findings."""

    def trial(self, own_optimizer: bool = True) -> ModelCopy:
        """A fresh copy with fixed random seeds, so that the same examination gives the same result."""
        torch.manual_seed(_SEED)
        return ModelCopy(self.model, self.loss_fn, self.optimizer if own_optimizer else None, self.convention)

    def batch(self, index: int = 0, rows: int | None = None) -> Any:
        """A batch on the model's device; a copy, so that changes to it have no effect."""
        batch = self.batches[index % len(self.batches)]
        return to_device(batch if rows is None else first_rows(batch, rows), self.device)

    def probe_batches(self) -> list[Any]:
        """The first few batches, on the device."""
        return [self.batch(index) for index in range(min(PROBE_BATCHES, len(self.batches)))]

    def steps(self, most: int, share: float) -> Iterator[int]:
        """Count steps until `most`, or until this share of the time budget is used up; at least two."""
        end = time.monotonic() + share * self.seconds
        for step in range(most):
            if step >= 2 and time.monotonic() > end:
                return
            yield step

    @property
    def facts(self) -> RunFacts:
        """The facts of the rehearsal, which is run when they are first needed; none if the model does not run."""
        if self.rehearsal is None:
            self.rehearsal = RunFacts() if self.refusal else rehearse(self)
        return self.rehearsal

    @property
    def first_calls(self) -> SampledCalls:
        """The calls of the first step of the rehearsal."""
        return next((step.calls for step in self.facts.sampled_steps), SampledCalls())

    @property
    def gradient_norms(self) -> list[float]:
        """The gradient norms of the rehearsal."""
        return [norm for each in self.facts.optimizers for norm in each.series.grad_norm if norm is not None]

    def measured(self, **facts: Any) -> None:
        """Add what a probe measured."""
        self.preflight = replace(self.preflight, **facts)

    def judged(self, causes: tuple[str, ...], otherwise: Check, facts: RunFacts | None = None) -> Check:
        """The first of some causes that the rules find, as a check; `otherwise` if they find none.

        The rules read the rehearsal or the given facts, and the measurements of the probes.
        """
        seen = self.facts if facts is None else facts
        if self._last is None or self._last[0] is not seen or self._last[1] is not self.preflight:
            self._last = seen, self.preflight, claims_of(replace(seen, preflight=self.preflight), REHEARSED)
        found = self._last[2]
        finding = next((found[cause] for cause in causes if cause in found), None)
        if finding is None:
            return otherwise
        return from_finding(otherwise.step, otherwise.name, finding, otherwise.expected)


STEPS = 60
_SHARE = 0.07
_STAND_IN_RATE = 1e-3


def rehearse(context: CheckContext) -> RunFacts:
    """Train a copy for a while and return what was recorded; an error ends the run, as it would end a script."""
    trial, watcher = context.trial(), Watcher(WatchOptions(is_preflight=True))
    if trial.optimizer is None and trial.parameters:
        trial.optimizer = torch.optim.Adam(trial.parameters, lr=_STAND_IN_RATE)
    error = None
    try:
        _train(context, trial, watcher)
    except Exception as raised:
        error = raised
    facts = watcher.as_facts()
    return replace(
        facts,
        optimizers=[
            replace(each, site="") for each in facts.optimizers
        ],  # the line that made the copy is not informative
        crash=None if error is None else crash_facts(error),
    )


def _train(context: CheckContext, trial: ModelCopy, watcher: Watcher) -> None:
    optimizer = trial.optimizer
    if optimizer is None:  # nothing can be trained
        watcher.sampler.begin()
        _backward(trial, watcher, context.batch())
        return
    ramps = is_warming_up(optimizer)
    trial.scale_rates(1.0)
    rates = trial.rates
    watcher.steps.optimizer_made(optimizer)
    for step in context.steps(STEPS, _SHARE):
        if ramps:
            trial.set_rates([rate * min(1.0, 2 * (step + 1) / STEPS) for rate in rates])
        batch = context.batch(step)
        loss = math.nan
        if needs_closure(optimizer):
            watcher.steps.before(optimizer, True)
            loss = float(optimizer.step(partial(_backward, trial, watcher, batch)))
        else:
            loss = float(_backward(trial, watcher, batch).detach())
            if context.clip is not None:
                watcher.calls.last_clip = {"clip_norm": trial.gradient_norm(), "clip_limit": context.clip}
            watcher.steps.before(optimizer, False)
            optimizer.step()
        watcher.steps.after(optimizer)
        if not math.isfinite(loss):
            return


def _backward(trial: ModelCopy, watcher: Watcher, batch: Any) -> Tensor:
    def before(loss: Tensor) -> None:
        watcher.backward.before(loss)
        if user_frame() is None:  # in a script, lines distinguish its losses; here there is only this one
            watcher.context.data.note(loss, None, watcher.state.steps, watcher.state.backwards)

    loss = trial.backward(batch, before)
    watcher.backward.after()
    return loss
