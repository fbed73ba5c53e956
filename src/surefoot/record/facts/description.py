"""`run.json`: what ran, where, with which versions, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass

from surefoot.record.facts.codec import Facts, item


@dataclass(frozen=True, kw_only=True, slots=True)
class RunDescription(Facts):
    """What is known about a run besides its facts. Everything may be missing."""

    exit_code: int | None = item(default=0, always=True)
    """How the script ended; `None` if it had not ended when this was written."""
    error: str | None = None
    """The name of the class of the error that ended the script."""
    script: str | None = None
    """The script or module that ran."""
    rank: int | None = None
    """The rank of the process."""
    world_size: int | None = None
    """The number of processes."""
    seconds: float | None = None
    """How long it ran."""
    torch: str | None = None
    """The version of torch."""
