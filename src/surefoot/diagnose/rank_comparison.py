"""Compares the records of the ranks of one run.

The files of the ranks are read one after the other, line by line. The comparison of a step does not keep the records of
all ranks, but only how many ranks have each value, and which ones have a value other than the most frequent one. So the
memory grows with the number of records, and with the ranks that differ, not with both together.

The value of most ranks is taken as the correct one. If two values are equally frequent, as with two ranks, that of the
lowest rank is used: DDP broadcasts from rank 0, and most scripts save it.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from surefoot.record.facts import RankOptimizer, RankSetup, ReplicaLook
from surefoot.record.facts.ranks import WRAPPED
from surefoot.record.rank_file import read_rank

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
    from pathlib import Path

FingerprintKind = Literal["parameters", "gradients", "moments"]
_SETUP = ("torch", "python", "device", "seed", "initialized", "world_size")
_HELD = 64
"""The number of ranks that are listed for each value."""


class Votes:
    """How many ranks have each value."""

    def __init__(self) -> None:
        self._ranks: dict[Hashable, list[int]] = {}
        self._counts: dict[Hashable, int] = {}

    def add(self, value: Hashable, rank: int) -> None:
        """Add the value of one rank."""
        self._counts[value] = self._counts.get(value, 0) + 1
        held = self._ranks.setdefault(value, [])
        if len(held) < _HELD:
            held.append(rank)

    @property
    def count(self) -> int:
        """The number of ranks that have a value."""
        return sum(self._counts.values())

    @property
    def values(self) -> list[Any]:
        """The different values."""
        return list(self._counts)

    @property
    def differ(self) -> bool:
        """Whether two ranks have different values."""
        return len(self._counts) > 1

    @property
    def agree(self) -> bool:
        """Whether several ranks have the same value, and none has another."""
        return len(self._counts) == 1 and self.count > 1

    def ranks_with(self, value: Hashable) -> list[int]:
        """The ranks that have a value, in order."""
        return sorted(self._ranks.get(value, []))

    @property
    def usual(self) -> Hashable:
        """The value of most ranks; if there are several, that of the lowest rank."""
        return max(self._counts, key=lambda value: (self._counts[value], -self._ranks[value][0]))

    @property
    def reference(self) -> int:
        """The lowest rank that has the usual value."""
        return self._ranks[self.usual][0]

    @property
    def odd(self) -> list[int]:
        """The ranks with another value than most, in order."""
        usual = self.usual
        return sorted(rank for value, ranks in self._ranks.items() if value != usual for rank in ranks)

    def mapped(self, change: Callable[[Any], Hashable]) -> Votes:
        """Votes for `change(value)` instead of each value."""
        found = Votes()
        for value, ranks in self._ranks.items():
            changed = change(value)
            found._counts[changed] = found._counts.get(changed, 0) + self._counts[value]
            found._ranks[changed] = sorted([*found._ranks.get(changed, []), *ranks])[:_HELD]
        return found

    def by_rank(self, most: int = 8) -> dict[str, Hashable]:
        """Some ranks with their values: the first that has the usual one, and the odd ones."""
        chosen = sorted([self.reference, *self.odd[: most - 1]])
        of = {rank: value for value, ranks in self._ranks.items() for rank in ranks}
        return {f"rank {rank}": of[rank] for rank in chosen}


@dataclass
class ComparedLook:
    """One optimizer at one step, on all ranks that recorded it."""

    step: int
    parameters: Votes = field(default_factory=Votes)
    gradients: Votes = field(default_factory=Votes)
    moments: Votes = field(default_factory=Votes)
    after: Votes = field(default_factory=Votes)
    next: Votes = field(default_factory=Votes)
    backwards: Votes = field(default_factory=Votes)
    lr: Votes = field(default_factory=Votes)
    scale: Votes = field(default_factory=Votes)
    skips: Votes = field(default_factory=Votes)
    inputs: Votes = field(default_factory=Votes)
    targets: Votes = field(default_factory=Votes)
    changed: Votes = field(default_factory=Votes)
    """Whether averaged gradients were changed between the backward and the step."""
    moved: list[int] = field(default_factory=list)
    """Ranks whose parameters changed between this step and the next one."""
    without_gradients: int = 0
    """The number of ranks with gradients of only 0, or none."""
    not_called: int = 0
    """The number of ranks on which the forward of DDP has never run."""
    not_synchronized: int = 0
    """The number of ranks on which the last forward of DDP did not request averaged gradients."""
    unsynchronized_steps: int = 0
    """The number of steps so far whose gradients DDP was not asked to average: the maximum over ranks."""
    communicated: int = 0
    """The number of values that a script has sent through its own collectives: the maximum over ranks."""

    def add(self, look: ReplicaLook, rank: int) -> None:
        """Add the record of one rank."""
        self.parameters.add(look.parameters.total, rank)
        self.gradients.add(look.gradients.total, rank)
        self.moments.add(look.moments.total, rank)
        self.backwards.add(look.backwards, rank)
        self.skips.add(look.skips, rank)
        self.lr.add(tuple(look.lr), rank)
        for votes, value in (
            (self.after, look.after),
            (self.next, look.next),
            (self.scale, look.scale),
            (self.inputs, look.inputs),
            (self.targets, look.targets),
            (self.changed, look.gradients_changed),
        ):
            if value is not None:
                votes.add(value, rank)
        if look.after is not None and look.next is not None and look.after != look.next:
            self.moved.append(rank)
        self.without_gradients += not look.has_gradients
        self.not_called += look.wrapper_called is False
        self.not_synchronized += look.synchronized is False
        self.communicated = max(self.communicated, look.communicated)
        self.unsynchronized_steps = max(self.unsynchronized_steps, look.unsynchronized_steps)


@dataclass
class ComparedOptimizer:
    """One optimizer on all ranks that hold the same parameters in it."""

    number: int
    facts: RankOptimizer
    """The description of the first of these ranks."""
    type: Votes = field(default_factory=Votes)
    settings: Votes = field(default_factory=Votes)
    looks: dict[int, ComparedLook] = field(default_factory=dict)
    """By step."""

    @property
    def wrapped(self) -> bool:
        """Whether DDP averages its gradients."""
        return self.facts.parallel == WRAPPED

    @property
    def shared(self) -> list[ComparedLook]:
        """The records of several ranks, in the order of their steps."""
        return [self.looks[step] for step in sorted(self.looks) if self.looks[step].parameters.count > 1]


class RankComparison:
    """The ranks of one run, as far as their files can be compared."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders: Mapping[int, Path] = {int(folder.name.removeprefix("rank")): folder for folder in folders}
        self.setups: dict[str, Votes] = {name: Votes() for name in _SETUP}
        self.code: dict[str, Votes] = {}
        """The hash of each file, by its name."""
        self.datasets: dict[int, Votes] = {}
        """The length of the dataset behind each `DistributedSampler`, by the number of its loader."""
        self.loaders = Votes()
        """The loaders that were iterated until the first step: for each, its sampler, rows and batch size."""
        self._groups: dict[tuple[int, str, tuple[int, ...] | None], ComparedOptimizer] = {}
        for rank, folder in self.folders.items():
            self._take(rank, folder)

    @property
    def world_size(self) -> int:
        """The expected number of ranks, as far as is known."""
        said = self.setups["world_size"]
        known = said.usual if said.count else 0
        return max(len(self.folders), known if isinstance(known, int) else 0)

    @property
    def optimizers(self) -> list[ComparedOptimizer]:
        """The optimizers that several ranks hold with the same parameters."""
        return [each for each in self._groups.values() if each.type.count > 1]

    def _take(self, rank: int, folder: Path) -> None:
        mine: dict[int, ComparedOptimizer] = {}
        for entry in read_rank(folder):
            if isinstance(entry, RankSetup):
                self._take_setup(rank, entry)
            elif isinstance(entry, RankOptimizer):
                mine[entry.number] = self._take_optimizer(rank, entry)
            elif entry.optimizer in mine and not entry.uneven:  # inside `join()`, equal numbers are not equal steps
                looks = mine[entry.optimizer].looks
                looks.setdefault(entry.step, ComparedLook(entry.step)).add(entry, rank)

    def _take_setup(self, rank: int, setup: RankSetup) -> None:
        for name, votes in self.setups.items():
            votes.add(getattr(setup, name), rank)
        for name, text in setup.code.items():
            self.code.setdefault(name, Votes()).add(text, rank)
        self.loaders.add(tuple((each.sampler, each.rows, each.batch_size) for each in setup.loaders), rank)
        for number, loader in enumerate(setup.loaders):
            if loader.sampler == "DistributedSampler" and loader.rows is not None:
                self.datasets.setdefault(number, Votes()).add(loader.rows, rank)

    def _take_optimizer(self, rank: int, facts: RankOptimizer) -> ComparedOptimizer:
        members = None if facts.members is None else tuple(facts.members)
        key = (facts.number, facts.layout, members)
        held = self._groups.setdefault(key, ComparedOptimizer(facts.number, facts))
        held.type.add(facts.type, rank)
        held.settings.add(_settings(facts), rank)
        return held

    def first_tensors(self, optimizer: int, step: int, kind: FingerprintKind, one: int, other: int) -> list[str]:
        """The names of the parameters that differ between two ranks, in their order."""
        return [name for name, here, there in self._pairs(optimizer, step, kind, one, other) if here != there]

    def equal_tensors(self, optimizer: int, step: int, kind: FingerprintKind, one: int, other: int) -> list[str]:
        """The names of the parameters that are equal on two ranks, and not all zeros."""
        pairs = self._pairs(optimizer, step, kind, one, other)
        return [name for name, here, there in pairs if here == there and any(here)]

    def _pairs(
        self, optimizer: int, step: int, kind: FingerprintKind, one: int, other: int
    ) -> list[tuple[str, bytes, bytes]]:
        """Each parameter with its fingerprints on two ranks."""
        mine, theirs = (self._each(rank, optimizer, step, kind) for rank in (one, other))
        return [] if mine is None or theirs is None else list(zip(mine[0], mine[1], theirs[1], strict=False))

    def _each(
        self, rank: int, optimizer: int, step: int, kind: FingerprintKind
    ) -> tuple[list[str], list[bytes]] | None:
        names: list[str] = []
        for entry in read_rank(self.folders[rank]):
            if isinstance(entry, RankOptimizer) and entry.number == optimizer:
                names = entry.names
            elif isinstance(entry, ReplicaLook) and (entry.optimizer, entry.step) == (optimizer, step):
                found = base64.b64decode(getattr(entry, kind).each)
                return names, [found[start : start + 4] for start in range(0, len(found), 4)]
        return None


def _settings(facts: RankOptimizer) -> tuple[tuple[tuple[str, str], ...], ...]:
    """All settings except the learning rate, which is compared at each step, in a comparable form."""
    left_out = ("lr", "initial_lr")
    groups = [{k: v for k, v in group.values.items() if k not in left_out} for group in facts.settings]
    return tuple(tuple(sorted((name, repr(value)) for name, value in group.items())) for group in groups)


def first_where(looks: Iterable[ComparedLook], kind: str) -> ComparedLook | None:
    """The first record at which the ranks differ in something."""
    return next((look for look in looks if getattr(look, kind).differ), None)
