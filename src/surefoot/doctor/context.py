"""What the checks share: the batches, how to call the model, copies on demand, the time that is left."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from surefoot.doctor.batches import first_rows, to_device
from surefoot.doctor.model_copy import ModelCopy, PassTrace

if TYPE_CHECKING:
    from collections.abc import Iterator

    from surefoot.diagnose.findings import Finding
    from surefoot.doctor.checks import Check
    from surefoot.doctor.loss_of_batch import Convention

TINY_ROWS = 8
"""Rows of the batch that must be overfitted."""

PROBE_BATCHES = 4
"""Batches that the short training probes go round."""

_SEED = 0


@dataclass
class CheckContext:
    """Everything a check may look at. The originals are read, never run."""

    model: nn.Module
    loss_fn: Any
    optimizer: Any
    batches: list[Any]
    """Batches of the training loader, on the host."""
    eval_batches: list[Any]
    seconds: float
    """The budget of the whole examination."""
    clip: float | None
    """The limit the user clips the gradient norm at, if it was told."""
    device: torch.device
    convention: Convention | None = None
    """How model and loss are called; `None` while no way is known."""
    look: PassTrace | None = None
    """A close look at the first batch, before any update."""
    claims: dict[str, Finding] = field(default_factory=dict)
    """What the rules of `diagnose` claim about that look, by the code of the cause."""
    refusal: str = ""
    """Why the model cannot be run on a copy; empty when it can."""
    checks: list[Check] = field(default_factory=list)
    """What was found so far: a fault whose cause is known already is not explained by another cause."""
    notes: list[str] = field(default_factory=list)
    overfits: bool | None = None
    """Whether the tiny batch was overfitted; `None` while nobody knows."""
    tiny_left: float | None = None
    """Share of the first loss that was left after the tiny batch was learnt as far as it could be."""
    gradient_norms: list[float] = field(default_factory=list)
    """Norms seen while training at the user's own rate."""

    def trial(self, own_optimizer: bool = True) -> ModelCopy:
        """A fresh copy, with the random streams at a fixed place, so that the same examination says the same."""
        torch.manual_seed(_SEED)
        return ModelCopy(self.model, self.loss_fn, self.optimizer if own_optimizer else None, self.convention)

    def batch(self, index: int = 0, rows: int | None = None) -> Any:
        """A batch on the model's device; a copy, so that nothing done to it lasts."""
        batch = self.batches[index % len(self.batches)]
        return to_device(batch if rows is None else first_rows(batch, rows), self.device)

    def probe_batches(self) -> list[Any]:
        """The first few batches, on the device."""
        return [self.batch(index) for index in range(min(PROBE_BATCHES, len(self.batches)))]

    def steps(self, most: int, share: float) -> Iterator[int]:
        """Count steps until `most`, or until this share of the time budget is used up; at least two are given."""
        end = time.monotonic() + share * self.seconds
        for step in range(most):
            if step >= 2 and time.monotonic() > end:
                return
            yield step

    def found(self, cause: str) -> bool:
        """Whether a cause was named already."""
        return any(check.cause == cause for check in self.checks)
