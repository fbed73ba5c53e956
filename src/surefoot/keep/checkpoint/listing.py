"""The contents of a folder of checkpoints: which steps are complete, which is best, which may be deleted.

Every rank writes its own part of a step, `step-00001000` (rank 0) and `step-00001000.rank-3`, and renames it
independently. A step is complete if all parts exist, by the number of processes in each part's manifest, and all are of
one session: a run that was killed while it saved a step again, after a restart, leaves new parts next to old ones.
Nothing else is stored: which step is last, good or best is derived from the manifests every time, so no pointer can be
wrong.

A save that is not good never replaces a good one of the same step: it is written under another name
(`step-00001000.evidence`), and loaded only by its path.

Newest means saved last: after a rollback, a lower step is the newer one. Saves are numbered, because clocks can be set
back.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from surefoot.errors import CheckpointError, UsageError
from surefoot.keep.checkpoint.folders import discard, sync
from surefoot.keep.checkpoint.manifest import Manifest, read_manifest

if TYPE_CHECKING:
    from pathlib import Path

log = logging.getLogger("surefoot")

_NAME = re.compile(r"step-(?P<step>\d{8,18})(?P<aside>\.evidence)?(\.rank-(?P<rank>[1-9]\d{0,8}))?")


def part_name(step: int, rank: int, aside: bool = False) -> str:
    """The name of the folder that holds one rank's part of a step."""
    return f"step-{step:08d}" + (".evidence" if aside else "") + (f".rank-{rank}" if rank else "")


def rank_of(name: str) -> int | None:
    """The rank whose part has this name; `None` for other names."""
    found = _NAME.fullmatch(name)
    return int(found["rank"] or 0) if found else None


@dataclass(frozen=True)
class CheckpointInfo:
    """One checkpoint, as described by its manifest."""

    step: int
    path: Path
    """The folder; with several processes, the part of this one."""
    good: bool
    """Whether it is finite and no detector had raised an alarm: usable for a rollback."""
    finite: bool
    quiet: bool
    best: bool
    """Whether it is the good one with the lowest metric."""
    metric: float | None
    reasons: tuple[str, ...]
    """The reasons why it was not quiet."""
    saved_at: str
    """The time of the save, in UTC, as ISO 8601."""
    bytes: int


@dataclass
class CheckpointListing:
    """One step in the folder."""

    step: int
    aside: bool = False
    """Whether it is evidence, and the same step has another checkpoint."""
    paths: dict[int, Path] = field(default_factory=dict)
    """The parts by rank."""
    manifests: dict[int, Manifest] = field(default_factory=dict)
    """The manifests that can be read."""
    faults: list[str] = field(default_factory=list)
    """The faults of the others."""
    orphans: list[Path] = field(default_factory=list)
    """Parts of ranks that no longer existed when rank 0 wrote its part."""

    @property
    def missing(self) -> list[int]:
        """The ranks whose part is missing."""
        count = max((_number(each, "world_size", 1) for each in self.manifests.values()), default=0)
        return [rank for rank in range(min(count, 1_000_000)) if rank not in self.paths]

    def exclude_orphans(self) -> None:
        """Exclude the parts that a larger run wrote under the same step."""
        if 0 in self.manifests:
            for rank in [rank for rank in self.paths if rank >= _number(self.manifests[0], "world_size", 1)]:
                self.orphans.append(self.paths.pop(rank))
                self.manifests.pop(rank, None)

    @property
    def fault(self) -> str | None:
        """The reason why the step is not complete, as far as is known without reading the tensors."""
        if self.faults:
            return self.faults[0]
        if missing := self.missing:
            return f"{part_name(self.step, missing[0], self.aside)}: the part of rank {missing[0]} is missing."
        if len({_number(each, "world_size", 1) for each in self.manifests.values()}) > 1:
            return (
                f"{part_name(self.step, 0, self.aside)}: its parts come from runs with different numbers of processes."
            )
        if len({str(each.facts.get("session")) for each in self.manifests.values()}) > 1:
            return f"{part_name(self.step, 0, self.aside)}: its parts were saved before and after a restart."
        return None

    @property
    def whole(self) -> bool:
        """Whether every part exists."""
        return self.fault is None

    @property
    def first(self) -> Manifest:
        """The manifest that defines order and metric for all ranks."""
        return self.manifests[min(self.manifests)]

    @property
    def order(self) -> tuple[int, int]:
        """Greater means saved later."""
        return (_number(self.first, "number", 0), self.step)

    @property
    def finite(self) -> bool:
        """Whether no part holds a NaN or an Inf."""
        return all(each.facts.get("finite") is True for each in self.manifests.values())

    @property
    def quiet(self) -> bool:
        """Whether no detector raised an alarm."""
        return all(each.facts.get("quiet") is True for each in self.manifests.values())

    @property
    def good(self) -> bool:
        """Whether training may return to it: finite, quiet, and not evidence of a step that has another checkpoint."""
        return self.finite and self.quiet and not self.aside

    @property
    def metric(self) -> float | None:
        """The metric that selects the best checkpoint; lower is better."""
        metric: Any = self.first.facts.get("metric")
        return metric if type(metric) is float and math.isfinite(metric) else None

    @property
    def metric_given(self) -> bool:
        """Whether the user chose that metric; a default metric is not compared with it."""
        return self.first.facts.get("metric_given") is not False

    def info(self, rank: int, best: bool) -> CheckpointInfo:
        """The description of the part of one rank."""
        manifest = self.manifests[rank]
        return CheckpointInfo(
            step=self.step,
            path=self.paths[rank],
            good=self.good,
            finite=self.finite,
            quiet=self.quiet,
            best=best,
            metric=self.metric,
            reasons=tuple(str(reason) for reason in manifest.facts.get("reasons") or ()),
            saved_at=manifest.saved_at,
            bytes=manifest.bytes,
        )


def _number(manifest: Manifest, name: Literal["rank", "world_size", "number"], otherwise: int) -> int:
    found: Any = manifest.facts.get(name)
    return found if type(found) is int else otherwise


def list_checkpoints(folder: Path) -> list[CheckpointListing]:
    """Every step in a folder, the highest first. Reads manifests, no tensors. Raises `OSError`."""
    steps: dict[tuple[int, bool], CheckpointListing] = {}
    for path in folder.iterdir():
        if found := _NAME.fullmatch(path.name):
            key = int(found["step"]), found["aside"] is not None
            steps.setdefault(key, CheckpointListing(*key)).paths[int(found["rank"] or 0)] = path
    for listing in steps.values():
        faults = {}
        for rank, path in sorted(listing.paths.items()):
            try:
                listing.manifests[rank] = _checked(path, listing.step, rank)
            except CheckpointError as error:
                faults[rank] = str(error)
        listing.exclude_orphans()
        listing.faults = [fault for rank, fault in faults.items() if rank in listing.paths]
    return sorted(steps.values(), key=lambda listing: (-listing.step, listing.aside))


def _checked(path: Path, step: int, rank: int) -> Manifest:
    manifest = read_manifest(path)
    if manifest.step != step or _number(manifest, "rank", 0) != rank:
        raise CheckpointError(
            f"{path.name}/manifest.json: it is of step {manifest.step}, rank {_number(manifest, 'rank', 0)}, "
            "and has been renamed."
        )
    return manifest


def make_evidence(path: Path, step: int, rank: int) -> None:
    """Rename the part of a rank, so that it is evidence and does not replace another save of the same step."""
    place = path.with_name(part_name(step, rank, aside=True))
    try:
        if place.exists():
            discard(place)
        path.rename(place)
        sync(path.parent)
    except OSError as error:
        log.warning("surefoot: %s belongs to a step that was undone, and cannot be renamed: %s", path, error)


def last_number(folder: Path) -> int:
    """The number of the last save in a folder; 0 if there is none."""
    try:
        return max((each.order[0] for each in list_checkpoints(folder) if each.manifests), default=0)
    except OSError:
        return 0


def complete_steps(steps: Sequence[CheckpointListing]) -> list[CheckpointListing]:
    """The complete steps, newest first."""
    return sorted((each for each in steps if each.whole), key=lambda each: each.order, reverse=True)


def by_metric(newest_first: Sequence[CheckpointListing]) -> list[CheckpointListing]:
    """The good steps with a metric, best first; of equal ones, the newer first."""
    usable = [(metric, each) for each in newest_first if each.good and (metric := each.metric) is not None]
    chosen = [pair for pair in usable if pair[1].metric_given]
    return [each for _, each in sorted(chosen or usable, key=lambda pair: pair[0])]


def to_keep(newest_first: Sequence[CheckpointListing], keep_last: int, keep_evidence: int) -> set[tuple[int, bool]]:
    """The steps to keep: the last good ones, the best, the last evidence, and at least one that is finite."""
    good = [each for each in newest_first if each.good]
    evidence = [each for each in newest_first if not each.good]
    finite = [each for each in newest_first if each.finite and not each.aside]
    kept = good[:keep_last] + by_metric(newest_first)[:1] + evidence[:keep_evidence]
    if not any(each in finite for each in kept):
        kept += finite[:1]
    return {(each.step, each.aside) for each in kept}


def incompletely_deleted(steps: Sequence[CheckpointListing]) -> list[CheckpointListing]:
    """Steps of which some ranks have deleted their parts, and the others will do so at their next save.

    They are older than every complete good step but the best one. After the last save of a run they stay: a rank that
    was early did not find the newest step complete yet.
    """
    newest_first = complete_steps(steps)
    best = by_metric(newest_first)[:1]
    recent = [each.order for each in newest_first if each.good and each not in best]
    oldest = min(recent or [each.order for each in newest_first], default=None)
    lacking = [each for each in steps if each.missing and not each.faults]
    return [each for each in lacking if oldest is not None and each.order < oldest]


def to_discard(
    steps: Sequence[CheckpointListing], rank: int, world_size: int, keep_last: int, keep_evidence: int
) -> list[Path]:
    """The folders that this rank may delete: its own parts and, for rank 0, those of ranks that no longer exist.

    A step that cannot be read is not deleted. An incomplete step is deleted when a later one is complete: a rank writes
    its parts in order, so the missing ones will not be written.
    """
    newest_first = complete_steps(steps)
    kept = to_keep(newest_first, keep_last, keep_evidence)
    discarded = []
    for each in steps:
        discarded += each.orphans if rank == 0 else []
        if each.faults or not each.manifests:
            continue
        superseded = bool(newest_first) and each.order < newest_first[0].order
        if ((each.step, each.aside) not in kept) if each.whole else superseded:
            gone = [owner for owner in each.paths if owner == rank or (rank == 0 and owner >= world_size)]
            discarded += [each.paths[owner] for owner in gone]
    return discarded


_WAY_OUT = "Pass the run folder, which contains `checkpoints/`."


def checkpoints_in(folder: Path) -> Path:
    """The folder of checkpoints, given that folder or its run folder. Raises `UsageError`."""
    inside = folder / "checkpoints"
    place = inside if inside.is_dir() else folder
    try:
        if list_checkpoints(place):
            return place
    except OSError as error:
        raise UsageError(f"{folder} cannot be read: {error.strerror}. {_WAY_OUT}") from error
    raise UsageError(f"no checkpoint in the folder {folder}/. {_WAY_OUT}")
