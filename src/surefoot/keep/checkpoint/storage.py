"""One checkpoint is one folder, which is complete or absent, and in which a single changed bit is detected.

    tensors.safetensors   every tensor, by its path in the state
    state.json            the rest of the state, see `keep/checkpoint/tree.py`
    manifest.json         schema, step, time, facts (finite, quiet, …), size and checksum of the two files above

Every flipped bit and every truncation, in any of the three files, is detected; the manifest has a checksum of its own
(`keep/checkpoint/manifest.py`).

The folder gets its final name when everything in it is on disk, see `keep/checkpoint/folders.py`.

Reading trusts nothing: names are fixed, links and devices are refused, checksums are compared first, tensors are read
with safetensors and the rest as JSON. Nothing is ever unpickled. Checksums do not show who wrote a file.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from surefoot.core.formats import CHECKPOINT
from surefoot.keep.checkpoint.folders import new_folder
from surefoot.keep.checkpoint.manifest import (
    MANIFEST,
    STATE,
    TENSORS,
    Manifest,
    SaveFacts,
    fault,
    opened,
    pickled,
    read_chunks,
    rendered,
    verify,
)
from surefoot.keep.checkpoint.plain import unflatten
from surefoot.keep.checkpoint.tensor_file import HashedFile, write_tensors
from surefoot.keep.checkpoint.tree import Flattened

if TYPE_CHECKING:
    from pathlib import Path


class Contents(NamedTuple):
    """The content of a checkpoint before it is assembled: the input and output of a migration."""

    facts: SaveFacts
    plain: Any
    tensors: Mapping[str, Tensor]


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
            file.write(rendered(vars(manifest)))
    return manifest


def _within(path: Sequence[str], unchecked: Collection[str]) -> bool:
    return any(".".join(path[:depth]) in unchecked for depth in range(1, len(path) + 1))


def _versions() -> SaveFacts:
    return {"surefoot": str(sys.modules["surefoot"].__version__), "torch": str(torch.__version__)}


# ---- reading ------------------------------------------------------------------------------------------------------


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
        raise fault(path, str(error).rstrip(".") or repr(error)) from error


def _read_state(path: Path) -> Any:
    text = b"".join(read_chunks(path))
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise fault(path, f"it is not JSON ({error}){pickled(text)}") from error


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
            with opened(self._path) as descriptor:
                start = os.read(descriptor, 16)
            raise fault(self._path, f"safetensors refuses it ({error}){pickled(start)}") from error
