"""Shared by the checks: the batches, how to call the model, copies on demand, the remaining time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from surefoot.diagnose.engine import claims_of
from surefoot.doctor.batches import first_rows, to_device
from surefoot.doctor.checks import Check, from_finding
from surefoot.doctor.model_copy import ModelCopy, PassTrace
from surefoot.doctor.probe_facts import REHEARSED
from surefoot.doctor.rehearsal import rehearse
from surefoot.record.facts import PreflightFacts, RunFacts, SampledCalls

if TYPE_CHECKING:
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
