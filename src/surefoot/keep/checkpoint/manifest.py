"""The manifest of a checkpoint: what it contains and whether it is intact, known without torch and without its tensors.

The manifest contains a checksum of its own content, and its text must be byte for byte what writing its content again
gives. `keep/checkpoint/storage.py` describes the folder that it belongs to.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

from surefoot.core.formats import CHECKPOINT
from surefoot.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

TENSORS, STATE, MANIFEST = "tensors.safetensors", "state.json", "manifest.json"
_LARGEST = 64 << 20
"""A larger file is not a manifest: it is read into memory before anything is known about it."""
_CHUNK_BYTES = 16 << 20


class FileFacts(TypedDict):
    """Size and checksum of one file."""

    bytes: int
    sha256: str


class SaveFacts(TypedDict, total=False):
    """Facts in the manifest of a checkpoint. The caller of `write` provides the first group, `write` the second."""

    quiet: bool
    """Whether no detector reported anything at that step."""
    reasons: list[str]
    """What the detectors reported."""
    metric: float | str | None
    """The metric that selects the best checkpoint; a non-finite one is stored as text."""
    metric_given: bool
    """Whether the user chose the metric."""
    rank: int
    world_size: int
    number: int
    """Saves are numbered: after a rollback, a lower step is the newer one."""
    session: str
    """Equal for all ranks of a run between two restarts; present only if they have agreed on one."""

    finite: bool
    broken: list[str]
    """The names of tensors that are not finite."""
    surefoot: str
    torch: str


@dataclass(frozen=True)
class Manifest:
    """The description of a checkpoint, available without reading its tensors."""

    schema: int
    """The version of the format in which it was written."""
    step: int
    saved_at: str
    """The time, in UTC, as ISO 8601."""
    facts: SaveFacts
    """`finite`, `broken` (names), `surefoot` and `torch` versions, and facts of the caller."""
    files: dict[str, FileFacts]
    """Bytes and SHA-256 of each file."""

    @property
    def bytes(self) -> int:
        """The size of the files on disk, except for the manifest."""
        return sum(int(facts["bytes"]) for facts in self.files.values())


def read_manifest(folder: Path) -> Manifest:
    """The manifest, if it is intact. The other files must exist with the right size; nothing else is checked.

    Raises `CheckpointError`.
    """
    path = folder / MANIFEST
    with opened(path) as descriptor:
        if os.fstat(descriptor).st_size > _LARGEST:
            raise fault(path, f"it is larger than {_LARGEST:,} bytes, so it is not a manifest")
    manifest = _parsed(path, b"".join(read_chunks(path)))
    for name in (TENSORS, STATE):
        with opened(folder / name) as descriptor:
            size, expected = os.fstat(descriptor).st_size, manifest.files[name]["bytes"]
        if size != expected:
            raise fault(folder / name, f"it has {size:,} bytes where the manifest says {expected:,}")
    return manifest


def verify(folder: Path) -> Manifest:
    """Read every byte and compare the checksums. Raises `CheckpointError` with the file and the fault."""
    manifest = read_manifest(folder)
    for name in (TENSORS, STATE):
        digest = hashlib.sha256()
        for chunk in read_chunks(folder / name):
            digest.update(chunk)
        if digest.hexdigest() != manifest.files[name]["sha256"]:
            raise fault(folder / name, "its checksum is not the one it was written with, so its content has changed")
    return manifest


def rendered(content: dict[str, object]) -> bytes:
    """The text of a manifest, which is unique for its content."""
    content = json.loads(json.dumps(content, allow_nan=False))  # keys become text now, not when it is read
    guarded = {**content, "checksum": _checksum(content)}
    return (json.dumps(guarded, indent=2, sort_keys=True, allow_nan=False) + "\n").encode()


def _checksum(content: dict[str, object]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, allow_nan=False).encode()).hexdigest()


def _parsed(path: Path, text: bytes) -> Manifest:
    """A manifest from its text. One with an older schema that can be migrated is returned unchanged."""
    try:
        content = json.loads(text)
        stored = content.pop("checksum")
        schema = content["schema"]
    except (ValueError, RecursionError, AttributeError, TypeError, KeyError) as error:
        raise fault(path, f"it is not a manifest{pickled(text)}") from error
    if problem := CHECKPOINT.problem(schema):
        raise fault(path, f"it {problem}")
    try:
        whole = stored == _checksum(content) and text == rendered(content)
    except (ValueError, RecursionError):
        whole = False
    if not whole:
        raise fault(path, "its own checksum does not match, so its content has changed")
    if not _well_formed(content):
        raise fault(path, "it lacks an entry, or has one of the wrong kind")
    return Manifest(**content)


def _well_formed(content: dict[str, Any]) -> bool:
    kinds = {"schema": int, "step": int, "saved_at": str, "facts": dict, "files": dict}
    if content.keys() != kinds.keys() or any(type(content[name]) is not kind for name, kind in kinds.items()):
        return False
    files = content["files"]
    if files.keys() != {TENSORS, STATE} or type(content["facts"].get("finite")) is not bool:
        return False
    return all(
        type(facts) is dict and type(facts.get("bytes")) is int and type(facts.get("sha256")) is str
        for facts in files.values()
    )


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """A plain file, open for reading: no link, no device, no pipe that would block indefinitely."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise fault(path, "it is a link" if path.is_symlink() else error.strerror or str(error)) from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise fault(path, "it is not a plain file")
        yield descriptor
    finally:
        os.close(descriptor)


def read_chunks(path: Path) -> Iterator[bytes]:
    """The content of a plain file, in pieces. Raises `CheckpointError`."""
    with opened(path) as descriptor:
        try:
            while chunk := os.read(descriptor, _CHUNK_BYTES):
                yield chunk
        except OSError as error:
            raise fault(path, f"it cannot be read: {error.strerror}") from error


def fault(path: Path, what: str) -> CheckpointError:
    """The error for a file of a checkpoint."""
    return CheckpointError(f"{path.parent.name}/{path.name}: {what}.")


def pickled(start: bytes) -> str:
    """A hint for files that torch.save or pickle wrote."""
    looks = start[:1] == b"\x80" or start[:2] == b"PK"
    return (
        "; it looks like a pickle, which surefoot never loads, because loading a pickle can run code" if looks else ""
    )
