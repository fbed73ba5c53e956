"""Selects a checkpoint and reads it, verifying every byte; skips a damaged one with a warning.

Each process verifies every part of a step, although it only needs its own: a rank that found its part damaged and used
an older step alone would continue with a different state. So every rank reads everything, without communication. Ranks
that agree afterwards on what they load share the work.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from surefoot.core.wording import count_of
from surefoot.errors import CheckpointError
from surefoot.keep.checkpoint.listing import CheckpointListing, by_metric, complete_steps, list_checkpoints, part_name
from surefoot.keep.checkpoint.manifest import SaveFacts, verify
from surefoot.keep.checkpoint.parts import SavedParts
from surefoot.keep.checkpoint.storage import read

if TYPE_CHECKING:
    from pathlib import Path


log = logging.getLogger("surefoot")

_ASKED_FOR = {"latest": "finite", "good": "finite and quiet", "best": "good and has a metric"}


@dataclass(frozen=True)
class Loaded:
    """A loaded state and its origin."""

    step: int
    path: Path
    """The folder; with several processes, the part of this one."""
    tree: Any
    """The saved state, with its tensors on the CPU."""
    facts: SaveFacts
    """The facts in the manifest: `finite`, `quiet`, `reasons`, `metric`, versions."""


@dataclass(frozen=True)
class Reader:
    """The process that reads, and the part of a state that it needs."""

    rank: int
    world_size: int
    place: Callable[[SavedParts], Any] | None = None
    """Assembles the state that this process needs from the parts of all. Without it, the process gets the part of its
    rank, and the number of processes must be the same as at the save."""
    shares_verifying: bool = False
    """Whether each part is verified by one process only, because all of them agree on what they load."""

    def read(self, listing: CheckpointListing) -> Loaded:
        """Read one step. Raises `CheckpointError`."""
        if self.place is not None:
            parts = SavedParts(listing, self.rank, self.world_size, self.shares_verifying)
            return Loaded(listing.step, listing.paths[parts.base], self.place(parts), parts.facts)
        count = len(listing.manifests)
        if count != self.world_size:
            raise CheckpointError(
                f"{part_name(listing.step, 0)}: it was saved by {count_of(count, 'rank')} and this run has "
                f"{self.world_size}. Start the same number, load a single part by its path, or load the whole state "
                "with `load(whole=True)`."
            )
        for other, path in listing.paths.items():
            if other != self.rank:
                verify(path)
        return load_path(listing.paths[self.rank])


def load_path(path: Path) -> Loaded:
    """Load one folder, which may be a part of a step. Raises `CheckpointError`."""
    manifest, tree = read(path)
    return Loaded(manifest.step, path, tree, manifest.facts)


def load_step(place: Path, step: int, reader: Reader) -> Loaded:
    """Load one step and no other. Raises `CheckpointError`."""
    steps = {each.step: each for each in reversed(listed_steps(place))}  # a good one replaces evidence
    if step not in steps:
        raise CheckpointError(
            f"there is no checkpoint of step {step} in {place}; there {f'are {sorted(steps)}' if steps else 'is none'}."
        )
    if fault := steps[step].fault:
        raise CheckpointError(fault)
    return reader.read(steps[step])


def load_first(place: Path, which: str, reader: Reader, without: Collection[int] = ()) -> Loaded | None:
    """The first complete one of the requested kind; `None` if there is none, `CheckpointError` if all are damaged."""
    steps = [each for each in listed_steps(place) if each.step not in without and not each.aside]
    faults = {each.step: each.fault for each in steps if each.fault is not None}
    passed_over = []
    for each in _candidates(complete_steps(steps), which):
        try:
            loaded = reader.read(each)
        except CheckpointError as error:
            faults[each.step] = str(error)
            passed_over.append(each.step)
            continue
        passed_over += [step for step in faults if step > each.step and step not in passed_over]
        for step in passed_over:
            log.warning("checkpoint %s It is skipped; step %d is loaded instead.", faults[step], each.step)
        return loaded
    if faults:
        found = " ".join(faults[step] for step in sorted(faults, reverse=True))
        raise CheckpointError(f"no checkpoint in {place} can be loaded: {found}")
    if steps:
        log.warning("none of the %d checkpoints in %s is %s, so none is loaded.", len(steps), place, _ASKED_FOR[which])
    return None


def listed_steps(place: Path) -> list[CheckpointListing]:
    """The steps in a folder; empty if it does not exist. Raises `CheckpointError`."""
    try:
        return list_checkpoints(place)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{place} cannot be read: {error.strerror}.") from error


def _candidates(newest_first: list[CheckpointListing], which: str) -> list[CheckpointListing]:
    if which == "best":
        return by_metric(newest_first)
    return [each for each in newest_first if (each.good if which == "good" else each.finite)]
