"""Export of a checkpoint to one plain safetensors file, import, and the listing of `surefoot checkpoints`.

`export_state` combines the parts of all processes in one file: every tensor completely under its path in the state, and
the rest of the state as text in the file's header. Any program that reads safetensors can read the tensors;
`import_state` converts the file back to a checkpoint, which any number of processes can resume from. `export_weights`
writes only the weights of the models, under the names that `load_state_dict` expects.

Values that differ between processes (random streams, position in the data, batch norm statistics) are those of rank 0.
The state is assembled in host memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TYPE_CHECKING

from torch import Tensor

from surefoot.core.formats import CHECKPOINT
from surefoot.errors import CheckpointError, UsageError
from surefoot.keep.checkpoint.listing import CheckpointListing, part_name
from surefoot.keep.checkpoint.loading import Loaded, Reader, load_first, load_step
from surefoot.keep.checkpoint.parts import SavedParts
from surefoot.keep.checkpoint.plain import unflatten
from surefoot.keep.checkpoint.shards import SavedShards, whole_tensors
from surefoot.keep.checkpoint.storage import TensorFile, fault_of, write
from surefoot.keep.checkpoint.tensor_file import HashedFile, write_tensors
from surefoot.keep.checkpoint.tree import Flattened
from surefoot.observe.parameters import plain_name

if TYPE_CHECKING:
    from pathlib import Path

    from surefoot.keep.checkpoint.manifest import FileFacts, SaveFacts


KEY = "surefoot.checkpoint"
"""The key of the rest of the state in the header of an exported file."""


# ---- one file -----------------------------------------------------------------------------------------------------


def load_whole(place: Path, which: str) -> Loaded:
    """A checkpoint with all tensors complete: 'latest', 'good', 'best' or a step. Raises `CheckpointError`."""
    reader = Reader(0, 1, lambda parts: whole_tensors(parts.tree(0)))
    if which.isdecimal():
        return load_step(place, int(which), reader)
    if which not in ("latest", "good", "best"):
        raise UsageError(f"--step must be 'latest', 'good', 'best' or the number of a step; got {which!r}.")
    found = load_first(place, which, reader)
    if found is None:
        raise CheckpointError(f"there is no {which} checkpoint in {place}; `surefoot checkpoints list` lists all.")
    return found


def export_state(loaded: Loaded, out: Path) -> FileFacts:
    """Write a checkpoint as one file, which must not exist yet."""
    flattened = Flattened(loaded.tree)
    flattened.name_tensors()
    facts = {name: value for name, value in loaded.facts.items() if name not in ("rank", "world_size", "number")}
    rest = {"schema": CHECKPOINT.version, "step": loaded.step, "facts": facts, "state": flattened.plain}
    return _written(out, flattened.tensors, {KEY: json.dumps(rest, allow_nan=False)})


def export_weights(loaded: Loaded, out: Path) -> FileFacts:
    """Write only the weights of the models, under the names that `load_state_dict` expects."""
    models = loaded.tree.get("models") if isinstance(loaded.tree, dict) else None
    if not isinstance(models, list):
        raise UsageError(
            "the checkpoint was not saved by a TrainingStabilizer, so it is not known which of its tensors are "
            "weights. Export the whole state, without --weights."
        )
    tensors = {
        (f"{number}." if len(models) > 1 else "") + plain_name(name): value
        for number, model in enumerate(models)
        for name, value in model.items()
        if isinstance(value, Tensor)
    }
    return _written(out, tensors, {"format": "pt"})


def _written(out: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> FileFacts:
    """Write a file under a hidden name, then rename it, so that it is never incomplete."""
    if os.path.lexists(out):
        raise UsageError(f"{out} already exists. Use another name, or delete it first.")
    hidden = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        with HashedFile(hidden) as file:
            write_tensors(file, tensors, set(), metadata)
        hidden.rename(out)
    except OSError as error:
        raise UsageError(f"{out} cannot be written: {error.strerror}.") from error
    finally:
        hidden.unlink(missing_ok=True)
    return file.facts


def import_state(file: Path, folder: Path) -> Path:
    """Make a checkpoint of an exported file, in a run folder; returns the checkpoint. Raises `CheckpointError`."""
    if not file.is_file():
        raise UsageError(f"{file} is not a file.")
    tensors = TensorFile(file)
    text = tensors.metadata().get(KEY)
    if text is None:
        raise UsageError(
            f"{file} contains tensors but no training state: it was not written by `surefoot checkpoints export`, or "
            "with --weights. To load only weights, use `model.load_state_dict(safetensors.torch.load_file(file))`."
        )
    with fault_of(file):
        rest = json.loads(text)
        if problem := CHECKPOINT.problem(rest.get("schema")):
            raise CheckpointError(f"it {problem}")
        step, known = int(rest["step"]), dict(rest["facts"])
        tree = unflatten(rest["state"], tensors)
    place = folder / "checkpoints" / part_name(step, 0)
    if place.exists():
        raise UsageError(f"{place} already exists. Use another folder, or delete it first.")
    facts: SaveFacts = {
        "quiet": known.get("quiet") is True,
        "reasons": [str(reason) for reason in known.get("reasons") or ()],
        "metric": known.get("metric"),
        "metric_given": known.get("metric_given") is not False,
        "rank": 0,
        "world_size": 1,
        "number": 1,
    }
    unchecked = () if known.get("finite") is not True else tuple(tree) if isinstance(tree, dict) else ()
    write(place, tree, facts, step=step, unchecked=unchecked)  # finite values have not changed since
    return place


# ---- verification -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class VerifiedStep:
    """The result of reading every byte of a step."""

    listing: CheckpointListing
    fault: str | None
    """The fault; `None` if there is none."""
    bytes: int
    tensors: int
    """The number of tensors that were sharded; each of their values was found once."""


def verify_step(listing: CheckpointListing) -> VerifiedStep:
    """Read every byte of a step, and check that the parts hold every value of every tensor once."""
    size = sum(manifest.bytes for manifest in listing.manifests.values())
    spread = 0
    try:
        if listing.fault is not None:
            raise CheckpointError(listing.fault)
        parts = SavedParts(listing, 0, 1)
        found: list[SavedShards] = []
        whole_tensors(parts.tree(0), partial(_noted, found))
        for each in found:
            held = sum(prod(shard.layout.local_shape) for shard in each.shards())
            if held != prod(each.shape):
                raise CheckpointError(
                    f"its parts contain {held:,} of the {prod(each.shape):,} values of {each.name!r}."
                )
        spread = len(found)
    except CheckpointError as error:
        return VerifiedStep(listing, str(error), size, spread)
    return VerifiedStep(listing, None, size, spread)


def _noted(found: list[SavedShards], shards: SavedShards) -> None:
    found.append(shards)
