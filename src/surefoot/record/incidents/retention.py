"""The location of incidents, and the space that they may use."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from surefoot.core.settings import check_types
from surefoot.errors import require

INCIDENTS = "incidents"
"""The folder within a run folder."""
_NAME = re.compile(r"\d{9,}(-.+)?")
_PART = re.compile(r"[\w.+-]+")


@dataclass(frozen=True)
class IncidentKeeper:
    """Keeps a bundle of every step that was refused or undone, up to limits on their number and size.

    >>> import surefoot as sf
    >>> sf.IncidentKeeper("runs/exp1", most=2)
    IncidentKeeper(folder='runs/exp1', most=2, most_bytes=2000000000, redact=True, part='')
    """

    folder: str | Path
    """The run folder; incidents are written to `incidents/<step>` in it."""
    most: int = 5
    """The maximum number of incidents in the folder, with those of earlier runs. Delete old ones to capture more."""
    most_bytes: int = 2_000_000_000
    """The maximum size of an incident. Gradients, optimizer state and model are left out first, in this order."""
    redact: bool = True
    """Whether paths are reduced to file names, and host, user and environment are not written."""
    part: str = ""
    """The optimizer of the run, if several stabilizers share a folder: `generator`."""

    def __post_init__(self) -> None:
        check_types(self)
        require(self.most >= 1, f"`most` must be at least 1, the incidents to keep; got {self.most}.")
        require(self.most_bytes >= 1, f"`most_bytes` must be positive; got {self.most_bytes}.")
        require(
            not self.part or _PART.fullmatch(self.part) is not None,
            f"`part` becomes a piece of a folder's name: letters, digits, '.', '_', '+', '-'; got {self.part!r}.",
        )

    def root(self, rank: int = 0, world_size: int = 1) -> Path:
        """The folder with the incidents of one process."""
        folder = Path(self.folder)
        return (folder / f"rank{rank}" if world_size > 1 else folder) / INCIDENTS

    def place(self, step: int, rank: int = 0, world_size: int = 1) -> Path:
        """The folder for the incident of a step."""
        name = f"{step:09d}-{self.part}" if self.part else f"{step:09d}"
        return self.root(rank, world_size) / name

    def has_room(self, step: int, rank: int = 0, world_size: int = 1) -> bool:
        """Whether the incident of a step may be written: there is room, and it does not exist yet."""
        root = self.root(rank, world_size)
        if not root.is_dir():
            return True
        kept = [path.name for path in root.iterdir() if _NAME.fullmatch(path.name)]
        return len(kept) < self.most and self.place(step, rank, world_size).name not in kept
