"""The content of an incident: the state before a bad step, its batches and gradients, and what is known about it.

A stabilizer, `attach` and `surefoot run` detect a bad step in different ways. The content of an incident, and how it is
written, is the same for all of them, and is defined here.
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

    from surefoot.record.incidents.bundle import IncidentKeeper
    from surefoot.record.incidents.step_capture import Window
    from surefoot.record.incidents.summary import IncidentPrints

SIGNALS_KEPT = 50
"""The number of steps, up to the bad one, that are listed with their loss, gradient norm and learning rate."""


@dataclass(frozen=True)
class CapturedStep:
    """Everything that is written about one bad step."""

    step: int
    event: Mapping[str, Any]
    """What happened: kind, severity, summary, action and evidence."""
    rank: int
    world_size: int
    inexact: Sequence[str]
    """The reasons why a replay cannot be exact; empty if it can."""
    applied_since: int
    """The number of steps that have been applied to the state since."""
    signals: Sequence[Mapping[str, Any]]
    """The steps up to this one, oldest first."""
    configuration: Mapping[str, Any]
    home: torch.device
    """The device of the parameters."""
    state: Mapping[str, Any]
    """Models with buffers and modes, optimizer, scheduler and scaler before the step; `None` values are not written."""
    window: Window | None
    """The batches and random streams; `None` if they are not known."""
    gradients: Mapping[str, Tensor] | None
    prints: IncidentPrints
    """The values that a replay is compared with."""

    def write(self, place: Path, keeper: IncidentKeeper) -> None:
        """Write the folder of the incident. Raises `OSError` if the disk fails."""
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
