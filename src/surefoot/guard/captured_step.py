"""A bad step as it is written: the state before it, its batches and gradients, and what is known about it.

A stabilizer, `attach` and `surefoot run` find out about a bad step in different ways and describe it with what each of
them knows. What an incident consists of, and how it is written, is the same for all of them, and is defined here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from surefoot.core.redaction import Redactor
from surefoot.record.incidents.bundle import write_incident
from surefoot.record.incidents.contents import window_part
from surefoot.record.incidents.environment import hardware, script, switches, versions

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from surefoot.record.incidents.retention import IncidentKeeper
    from surefoot.record.incidents.step_capture import Window
    from surefoot.record.incidents.summary import IncidentPrints

SIGNALS_KEPT = 50
"""So many steps up to the bad one are listed with their loss, gradient norm and learning rate."""


@dataclass(frozen=True)
class CapturedStep:
    """Everything that is written of one bad step."""

    step: int
    event: Mapping[str, Any]
    """What happened: kind, severity, summary, action and evidence."""
    rank: int
    world_size: int
    inexact: Sequence[str]
    """Why a replay cannot be exact; empty if it can."""
    applied_since: int
    """How many steps have been applied to the state since."""
    signals: Sequence[Mapping[str, Any]]
    """The steps up to this one, oldest first."""
    configuration: Mapping[str, Any]
    home: torch.device
    """Where the parameters are."""
    state: Mapping[str, Any]
    """Models with buffers and modes, optimizer, scheduler and scaler before the step; what is `None` is not written."""
    window: Window | None
    """The batches and random streams; `None` if they are not known."""
    gradients: Mapping[str, Tensor] | None
    prints: IncidentPrints
    """What a replay is compared with."""

    def write(self, place: Path, keeper: IncidentKeeper) -> None:
        """Write the folder of the incident. Raises `OSError` when the disk does."""
        redact, left_out = Redactor(keeper.redact), list[str]()
        with torch.no_grad():
            facts = {
                "step": self.step,
                "part": keeper.part,
                **self.event,
                "exact": not self.inexact,
                "inexact": self.inexact,
                "applied_since": self.applied_since,
                "rank": self.rank,
                "world_size": self.world_size,
                "signals": self.signals,
                "configuration": self.configuration,
                "versions": versions(),
                "hardware": hardware(self.home),
                "switches": switches(),
                "script": script(redact),
                "fingerprints": self.prints,
            }
            window = None if self.window is None else window_part(self.window, redact, left_out)
            tree = {**self.state, "window": window, "gradients": self.gradients}
            write_incident(place, facts | {"left_out": left_out}, tree, keeper, redact)
