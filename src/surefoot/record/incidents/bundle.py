"""Writes an incident: one folder that is complete or absent.

    incident.json      what happened, with which numbers, settings, versions and hardware; the prints to compare with
    summary.md         the same for a person to read, or to paste into an issue
    state/             model, optimizer, schedule, scaler, streams, batches and gradients: a checkpoint folder, see
                       `keep/checkpoint/storage.py` (safetensors and JSON with checksums, no pickle)

If it is too large, whole parts are left out, in the order of `LEFT_OUT_FIRST`, and named. So is a part that cannot be
written without pickle.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from torch import Tensor

from surefoot.core.files import make_subfolder, read_file, write_file
from surefoot.core.formats import INCIDENT
from surefoot.core.nested import leaves, map_leaves
from surefoot.core.settings import check_types
from surefoot.errors import UsageError, require
from surefoot.keep.checkpoint import storage
from surefoot.keep.checkpoint.folders import new_folder, sweep
from surefoot.keep.checkpoint.tensor_file import HashedFile
from surefoot.keep.checkpoint.tree import Flattened
from surefoot.record.incidents.summary import IncidentFacts, summary_of

if TYPE_CHECKING:
    from surefoot.core.redaction import Redactor

StateParts: TypeAlias = dict[str, Any]
"""The state before the step by part: `models`, `optimizer`, `window`, …; each has its own form."""
FACTS, SUMMARY, STATE = "incident.json", "summary.md", "state"
LEFT_OUT_FIRST = ("gradients", "optimizer", "buffers", "models", "scheduler", "scaler", "window")
"""Parts of the state, least needed for a replay first. Forward and backward need neither moments nor old gradients."""
NOT_FREE_TEXT = ("versions", "hardware", "switches", "fingerprints")
"""Values of torch and the machine that are compared with those of a replay. They are not redacted, even if an
environment variable contains "x86_64" or "2.13.0"."""
_ABOUT = {
    "gradients": "the gradients of the step; their fingerprints are included",
    "optimizer": "the optimizer's state; forward and backward can be run again without it",
    "buffers": "buffers that are not part of the model's state_dict",
    "models": "the weights; without them the step cannot be run again",
    "scheduler": "the state of the learning-rate schedule",
    "scaler": "the state of the loss scaler",
    "window": "the batches and random streams; without them the step cannot be run again",
}


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


def write_incident(
    place: Path, facts: Mapping[str, Any], tree: StateParts, keeper: IncidentKeeper, redact: Redactor
) -> None:
    """Write the folder of one incident; `facts` are `IncidentFacts`. Raises `OSError` if the disk fails."""
    left_out = list(facts.get("left_out", []))
    tree = map_leaves(tree, redact, str) if keeper.redact else tree
    kept = _fitting(_writable(tree, left_out), keeper.most_bytes, left_out)
    given = {name: value for name, value in facts.items() if name != "left_out"}
    whole = {"schema": INCIDENT.version, **given, "parts": sorted(kept), "left_out": left_out}
    kept_words = {name: whole[name] for name in NOT_FREE_TEXT if name in whole}
    plain: IncidentFacts = as_plain(redact.inside(whole) | kept_words)
    if place.parent.is_dir():
        sweep(place.parent, lambda name: True)  # a run that was killed while writing has left hidden gigabytes
    make_subfolder(place.parent)
    with new_folder(place) as hidden:
        storage.write(hidden / STATE, kept, {}, step=int(facts["step"]), unchecked=tuple(kept))
        _write_text(hidden / FACTS, json.dumps(plain, indent=2, allow_nan=False, ensure_ascii=False) + "\n")
        _write_text(hidden / SUMMARY, summary_of(plain))


def note_action(place: Path, action: str) -> None:
    """Add the response to an incident to its folder, when it is known. Raises `OSError` and `ValueError`."""
    facts = json.loads(read_file(place / FACTS)) | {"action": action}
    write_file(place / FACTS, json.dumps(facts, indent=2, allow_nan=False, ensure_ascii=False) + "\n")
    write_file(place / SUMMARY, summary_of(facts))


def _write_text(path: Path, text: str) -> None:
    with HashedFile(path) as file:
        file.write(text.encode("utf-8", "replace"))


def _writable(tree: StateParts, left_out: list[str]) -> StateParts:
    """The parts that can be written without pickle."""
    kept = {}
    for part, content in tree.items():
        if content is None:
            continue
        try:
            Flattened({part: content})
        except UsageError as error:
            left_out.append(f"{_ABOUT.get(part, part)}: {error}")
        else:
            kept[part] = content
    return kept


def _fitting(tree: StateParts, most_bytes: int, left_out: list[str]) -> StateParts:
    sizes = {part: bytes_in(content) for part, content in tree.items()}
    for part in LEFT_OUT_FIRST:
        if sum(sizes.values()) <= most_bytes:
            break
        if part in sizes and sizes[part] > 0:
            left_out.append(f"{_ABOUT[part]} ({sizes[part]:,} bytes, more than fits in {most_bytes:,})")
            del sizes[part]
    return {part: tree[part] for part in sizes}


def bytes_in(content: Any) -> int:
    """The size of the tensors and arrays in a nested value."""
    return sum(found.nbytes for found in leaves(content, (Tensor, np.ndarray)))


def as_plain(value: Any) -> Any:
    """As JSON: NaN and infinities as words, unknown objects as text."""
    if isinstance(value, bool) or value is None or isinstance(value, (int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, Mapping):
        return {str(key): as_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [as_plain(item) for item in value]
    if isinstance(value, (Tensor, np.ndarray, np.generic)) and getattr(value, "size", 1) != 0:
        return as_plain(value.tolist())
    return str(value)
