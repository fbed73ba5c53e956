"""Reads an incident. Nothing in it is trusted: no pickle, checksums first, and every fault is raised as one error."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from surefoot.core.formats import INCIDENT
from surefoot.errors import CheckpointError, UsageError
from surefoot.keep.checkpoint import storage
from surefoot.record.incidents.bundle import FACTS, STATE, StateParts

if TYPE_CHECKING:
    from surefoot.record.incidents.summary import IncidentFacts

LARGEST_FACTS = 256 << 20
_NEEDED: dict[str, type] = {
    "step": int,
    "kind": str,
    "summary": str,
    "exact": bool,
    "inexact": list,
    "configuration": dict,
    "versions": dict,
    "hardware": dict,
    "switches": dict,
    "script": dict,
    "fingerprints": dict,
}


@dataclass(frozen=True)
class StoredIncident:
    """A stored incident."""

    folder: Path
    facts: IncidentFacts
    """The content of `incident.json`."""
    state: StateParts
    """The stored parts: `models`, `optimizer`, `window`, …"""

    def check_replayable(self) -> None:
        """Raise `UsageError` if the weights, or the batches and random streams, are missing."""
        if missing := [part for part in ("models", "window") if part not in self.state]:
            raise UsageError(f"the incident {self.folder} lacks {' and '.join(missing)}: it cannot be replayed")


def read_facts(folder: Path) -> IncidentFacts:
    """The content of `incident.json`. Raises `UsageError` if it is not an incident of this version."""
    path = folder / FACTS
    if not path.is_file():
        inside = sorted(found.parent.name for found in folder.glob(f"incidents/*/{FACTS}")) if folder.is_dir() else []
        if inside:
            raise UsageError(f"{folder} is a run folder; pass one of its incidents: {folder}/incidents/{inside[0]}")
        raise UsageError(
            f"{folder} is not an incident: it has no {FACTS}. Expected a folder such as runs/exp1/incidents/000000123"
        )
    try:
        if path.stat().st_size > LARGEST_FACTS:
            raise ValueError("it is too large")
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    facts = INCIDENT.read(found, str(path))
    wrong = [name for name, kind in _NEEDED.items() if type(facts.get(name)) is not kind]
    wrong += [] if wrong or _are_prints(facts["fingerprints"]) else ["fingerprints"]
    if wrong:
        raise UsageError(f"{path} lacks {', '.join(wrong)}, or has another kind of value there")
    return cast("IncidentFacts", facts)


def _are_prints(found: Any) -> bool:
    """Whether they have the structure that `prints_of` creates."""
    try:
        losses = [each for losses in found["losses"] for each in losses]
        inputs = [each for calls in found["inputs"] for call in calls for each in call]
        gradients = list(found["gradients"].values())
        named = all(type(each["sha256"]) is str for each in [*losses, *inputs])
        return named and all("value" in each for each in losses) and all(type(each) is dict for each in gradients)
    except (KeyError, TypeError, AttributeError):
        return False


def read_incident(folder: str | Path) -> StoredIncident:
    """Everything of an incident. Raises `UsageError` with the file and the fault."""
    folder = Path(folder)
    facts = read_facts(folder)
    _check_size(folder)
    try:
        _, state = storage.read(folder / STATE)
    except CheckpointError as error:
        raise UsageError(f"the incident {folder} is damaged: {error}") from error
    if not isinstance(state, dict):
        raise UsageError(f"the incident {folder} is damaged: its state is a {type(state).__name__}")
    return StoredIncident(folder, facts, state)


def _check_size(folder: Path) -> None:
    """Refuse a state that does not fit in memory: the size in a file header may be larger than the disk."""
    size = sum(path.lstat().st_size for path in (folder / STATE).glob("*"))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else size
    if size > memory:
        raise UsageError(
            f"the state of the incident {folder} has {size:,} bytes, more than the {memory:,} bytes of memory here; it "
            "is not read"
        )


def number(value: Any) -> float:
    """A number of `incident.json`, where NaN and infinities are words; NaN if it is not a number."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan
