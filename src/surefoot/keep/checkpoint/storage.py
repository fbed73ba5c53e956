"""One checkpoint is one folder, which is complete or absent, and in which a single changed bit is detected.

    tensors.safetensors   every tensor, by its path in the state
    state.json            the rest of the state, see `keep/checkpoint/tree.py`
    manifest.json         schema, step, time, facts (finite, quiet, …), size and checksum of the two files above

The manifest contains a checksum of its own content, and its text must be byte for byte what writing its content again
gives. So every flipped bit and every truncation, in any of the three files, is detected.

The folder gets its final name when everything in it is on disk, see `keep/checkpoint/folders.py`.

Reading trusts nothing: names are fixed, links and devices are refused, checksums are compared first, tensors are read
with safetensors and the rest as JSON. Nothing is ever unpickled. Checksums do not show who wrote a file.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, cast

import torch
from torch import Tensor

from surefoot.core.formats import CHECKPOINT
from surefoot.errors import CheckpointError
from surefoot.keep.checkpoint.folders import new_folder
from surefoot.keep.checkpoint.tensor_file import CHUNK_BYTES, FileFacts, HashedFile, write_tensors
from surefoot.keep.checkpoint.tree import Flattened, unflatten

if TYPE_CHECKING:
    from pathlib import Path

TENSORS, STATE, MANIFEST = "tensors.safetensors", "state.json", "manifest.json"
LARGEST_MANIFEST = 64 << 20
"""A larger file is not a manifest: it is read into memory before anything is known about it."""


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


class Contents(NamedTuple):
    """The content of a checkpoint before it is assembled: the input and output of a migration."""

    facts: SaveFacts
    plain: Any
    tensors: Mapping[str, Tensor]


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


# ---- writing ------------------------------------------------------------------------------------------------------


def write(folder: Path, tree: Any, facts: SaveFacts, *, step: int, unchecked: Collection[str] = ()) -> Manifest:
    """Write a state as the checkpoint `folder`, completely or not at all.

    `unchecked` names tensors that may hold NaN and Inf: keys of the tree, or paths such as "models.0.mask".
    """
    return write_flat(folder, Flattened(tree), facts, step=step, unchecked=unchecked)


def write_flat(
    folder: Path,
    flattened: Flattened,
    facts: SaveFacts,
    *,
    step: int,
    unchecked: Collection[str] = (),
    choose: Callable[[bool], Path] | None = None,
) -> Manifest:
    """`write` for a state that is already flattened.

    `choose` is called with whether the state is finite, and returns another folder in the same directory.
    """
    flattened.name_tensors()
    judged = {name for name, paths in flattened.owners.items() if not all(_within(path, unchecked) for path in paths)}
    broken: list[str] = []
    with new_folder(folder, None if choose is None else lambda: choose(not broken)) as hidden:
        files = {}
        with HashedFile(hidden / TENSORS) as file:
            broken += write_tensors(file, flattened.tensors, judged)
            files[TENSORS] = file.facts
        with HashedFile(hidden / STATE) as file:
            file.write((json.dumps(flattened.plain, allow_nan=False) + "\n").encode())
            files[STATE] = file.facts
        found: SaveFacts = {**facts, "finite": not broken, "broken": broken, **_versions()}
        saved_at = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        manifest = Manifest(CHECKPOINT.version, step, saved_at, found, files)
        with HashedFile(hidden / MANIFEST) as file:
            file.write(_rendered(vars(manifest)))
    return manifest


def _within(path: Sequence[str], unchecked: Collection[str]) -> bool:
    return any(".".join(path[:depth]) in unchecked for depth in range(1, len(path) + 1))


def _versions() -> SaveFacts:
    return {"surefoot": str(sys.modules["surefoot"].__version__), "torch": str(torch.__version__)}


def _rendered(content: dict[str, object]) -> bytes:
    """The text of a manifest, which is unique for its content."""
    content = json.loads(json.dumps(content, allow_nan=False))  # keys become text now, not when it is read
    guarded = {**content, "checksum": _checksum(content)}
    return (json.dumps(guarded, indent=2, sort_keys=True, allow_nan=False) + "\n").encode()


def _checksum(content: dict[str, object]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, allow_nan=False).encode()).hexdigest()


# ---- reading ------------------------------------------------------------------------------------------------------


def read_manifest(folder: Path) -> Manifest:
    """The manifest, if it is intact. The other files must exist with the right size; nothing else is checked.

    Raises `CheckpointError`.
    """
    path = folder / MANIFEST
    with _opened(path) as descriptor:
        if os.fstat(descriptor).st_size > LARGEST_MANIFEST:
            raise _fault(path, f"it is larger than {LARGEST_MANIFEST:,} bytes, so it is not a manifest")
    manifest = _parsed(path, b"".join(_read_chunks(path)))
    for name in (TENSORS, STATE):
        with _opened(folder / name) as descriptor:
            size, expected = os.fstat(descriptor).st_size, manifest.files[name]["bytes"]
        if size != expected:
            raise _fault(folder / name, f"it has {size:,} bytes where the manifest says {expected:,}")
    return manifest


def verify(folder: Path) -> Manifest:
    """Read every byte and compare the checksums. Raises `CheckpointError` with the file and the fault."""
    manifest = read_manifest(folder)
    for name in (TENSORS, STATE):
        digest = hashlib.sha256()
        for chunk in _read_chunks(folder / name):
            digest.update(chunk)
        if digest.hexdigest() != manifest.files[name]["sha256"]:
            raise _fault(folder / name, "its checksum is not the one it was written with, so its content has changed")
    return manifest


def read(folder: Path) -> tuple[Manifest, Any]:
    """The manifest and the state, verified. Raises `CheckpointError` with the file and the fault."""
    manifest = verify(folder)
    contents = read_contents(folder, manifest, _read_tensors(folder / TENSORS))
    with fault_of(folder / STATE):
        tree = unflatten(contents.plain, contents.tensors)
    return replace(manifest, facts=contents.facts), tree


def read_contents(folder: Path, manifest: Manifest, tensors: Mapping[str, Tensor]) -> Contents:
    """The content of a checkpoint, in the current version of the format. Raises `CheckpointError`."""
    contents = Contents(manifest.facts.copy(), _read_state(folder / STATE), tensors)
    with fault_of(folder / STATE):  # the input of a migration is untrusted too
        return CHECKPOINT.migrate(contents, manifest.schema)  # type: ignore[no-any-return]


@contextmanager
def fault_of(path: Path) -> Iterator[None]:
    """Convert any exception that the content of a file raises into a `CheckpointError`."""
    try:
        yield
    except Exception as error:
        raise _fault(path, str(error).rstrip(".") or repr(error)) from error


def _read_state(path: Path) -> Any:
    text = b"".join(_read_chunks(path))
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _fault(path, f"it is not JSON ({error}){_pickled(text)}") from error


def _read_tensors(path: Path) -> dict[str, Tensor]:
    file = TensorFile(path)
    return {name: file[name] for name in file}


class TensorFile(Mapping[str, Tensor]):
    """The tensors of a file, each read when it is accessed. Raises `CheckpointError` for a file without tensors."""

    def __init__(self, path: Path) -> None:
        from safetensors import safe_open

        self._path = path
        with self._refusals():
            self._file = cast("Any", safe_open(path, framework="pt"))
            self._names = frozenset(self._file.keys())

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        # Copied, because the library may return the file's own pages, and the file may be deleted or truncated later.
        with self._refusals():
            return self._file.get_tensor(name).clone()  # type: ignore[no-any-return]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def part(self, name: str, at: tuple[slice, ...]) -> Tensor:
        """Read a part of a tensor."""
        if not at:
            return self[name]
        with self._refusals():
            return self._file.get_slice(name)[at].clone()  # type: ignore[no-any-return]

    def metadata(self) -> dict[str, str]:
        """The text in the header of the file."""
        with self._refusals():
            return dict(self._file.metadata() or {})

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # the library's own error has no documented base
            with _opened(self._path) as descriptor:
                start = os.read(descriptor, 16)
            raise _fault(self._path, f"safetensors refuses it ({error}){_pickled(start)}") from error


def _parsed(path: Path, text: bytes) -> Manifest:
    """A manifest from its text. One with an older schema that can be migrated is returned unchanged."""
    try:
        content = json.loads(text)
        said = content.pop("checksum")
        schema = content["schema"]
    except (ValueError, RecursionError, AttributeError, TypeError, KeyError) as error:
        raise _fault(path, f"it is not a manifest{_pickled(text)}") from error
    if problem := CHECKPOINT.problem(schema):
        raise _fault(path, f"it {problem}")
    try:
        whole = said == _checksum(content) and text == _rendered(content)
    except (ValueError, RecursionError):
        whole = False
    if not whole:
        raise _fault(path, "its own checksum does not match, so its content has changed")
    if not _well_formed(content):
        raise _fault(path, "it lacks an entry, or has one of the wrong kind")
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
def _opened(path: Path) -> Iterator[int]:
    """A plain file, open for reading: no link, no device, no pipe that would block indefinitely."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise _fault(path, "it is a link" if path.is_symlink() else error.strerror or str(error)) from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise _fault(path, "it is not a plain file")
        yield descriptor
    finally:
        os.close(descriptor)


def _read_chunks(path: Path) -> Iterator[bytes]:
    with _opened(path) as descriptor:
        try:
            while chunk := os.read(descriptor, CHUNK_BYTES):
                yield chunk
        except OSError as error:
            raise _fault(path, f"it cannot be read: {error.strerror}") from error


def _fault(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path.parent.name}/{path.name}: {what}.")


def _pickled(start: bytes) -> str:
    """A hint for files that torch.save or pickle wrote."""
    looks = start[:1] == b"\x80" or start[:2] == b"PK"
    return (
        "; it looks like a pickle, which surefoot never loads, because loading a pickle can run code" if looks else ""
    )
