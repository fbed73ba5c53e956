"""`run.json`: what ran, where, with which versions, and how it ended."""

from __future__ import annotations

from surefoot.record.facts.codec import Facts, item
from surefoot.record.facts.optimizers import GroupSettings


class OptimizerSetup(Facts):
    """One optimizer that a stabilizer steps, as it was when the stabilizer was made."""

    part: str = ""
    """The part of the run log that its steps are written to; empty for a log that is not divided."""
    type: str | None = None
    """The name of its class."""
    settings: list[GroupSettings] = item(factory=list, always=True)
    """The settings of its first eight parameter groups."""
    scheduler: str | None = None
    """The name of the class of its learning-rate scheduler."""


class RunDescription(Facts):
    """What is known about a run besides its facts. Everything may be missing."""

    exit_code: int | None = item(default=0, always=True)
    """How the script ended; `None` if it had not ended when this was written."""
    error: str | None = None
    """The name of the class of the error that ended the script."""
    script: str | None = None
    """The script or module that ran."""
    eager_looks: bool = False
    """Whether compiled models were to run eagerly in sampled steps (`--eager-looks`)."""
    rank: int | None = None
    """The rank of the process."""
    world_size: int | None = None
    """The number of processes."""
    seconds: float | None = None
    """How long it ran."""
    torch: str | None = None
    """The version of torch."""
    optimizers: list[OptimizerSetup] = item(factory=list)
    """The optimizers of a stabilizer's run."""
