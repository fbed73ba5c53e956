"""The state that loaders carry from one pass to the next: their generators, and persistent workers.

A shuffling loader with its own generator draws its next order from the state after the last pass, and with
`persistent_workers` the workers' random streams continue too. After a restart, complete passes are not repeated, so
this state is restored when the loader is used again. An entry is one set of generators, or one loader with persistent
workers. Entries are identified by the passes that used them.

Not covered: batches that persistent workers had prepared when a pass was abandoned, if the position is saved in a later
pass over another loader. The random numbers that they used are not counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypedDict

import torch

from surefoot.core.weak_reference import weak_reference
from surefoot.keep.position.generators import Generators, read_generators, set_generators
from surefoot.keep.position.workers import FollowedWorkers, WorkerPlan

if TYPE_CHECKING:
    from torch import Tensor


_NO_ENTRY = -1
_MOST_ENTRIES = 64


class EntriesState(TypedDict):
    """What is stored about the entries."""

    of_pass: Tensor
    """The entry of each pass, by the number of the pass."""
    saved: dict[int, Any]
    """The state of each entry."""


class LoaderState:
    """Which pass used which entry, the saved state of each, and the object that each is bound to in this process."""

    def __init__(self, state: EntriesState | None) -> None:
        self.of_pass: list[int] = [] if state is None else state["of_pass"].tolist()
        self.saved: dict[int, Any] = {} if state is None else {int(key): each for key, each in state["saved"].items()}
        self.bound: dict[int, Any] = {}

    def note(self, number: int, entry: int) -> None:
        """Pass `number` uses `entry`."""
        if number >= len(self.of_pass):
            self.of_pass += [_NO_ENTRY] * (number - len(self.of_pass)) + [entry]

    def bind(self, entry: int, to: Any) -> None:
        """Bind `entry` to an object of this process; if there are very many, the oldest are dropped."""
        self.bound[entry] = to
        for oldest in sorted(self.bound)[:-_MOST_ENTRIES]:
            self.bound.pop(oldest)
            self.saved.pop(oldest, None)

    def unbound(self, number: int, epochs_done: int, fits: Callable[[Any], bool]) -> int:
        """The saved entry that pass `number` used, or that belongs to a loader used for the first time; else a new one.

        Completed epochs are skipped, so their loaders are used later. An entry that served only one pass in each of
        several epochs was created again in each of them: the new one is not set.
        """
        left = [entry for entry in self.saved if entry not in self.bound]
        if number < len(self.of_pass):
            left = [entry for entry in left if entry == self.of_pass[number]]
        else:
            left = [entry for entry in left if epochs_done < 2 or self.of_pass.count(entry) > 1]
        fitting = (entry for entry in left if fits(self.saved[entry]))
        return next(fitting, max([_NO_ENTRY, *self.of_pass, *self.saved, *self.bound]) + 1)

    def state_dict(self, current: dict[int, Any]) -> EntriesState:
        """Tensors and plain values; entries that are not bound stay as they were loaded."""
        states = {entry: saved for entry, saved in self.saved.items() if entry not in self.bound} | current
        return {
            "of_pass": torch.tensor(self.of_pass, dtype=torch.int32),
            "saved": {entry: saved for entry, saved in states.items() if saved},
        }


class GeneratorState:
    """The generators of the followed loaders."""

    def __init__(self, state: EntriesState | None = None) -> None:
        self._entries = LoaderState(state)

    def begin_pass(self, number: int, generators: Generators, epochs_done: int) -> None:
        """A pass begins over a loader with these generators; those of a loaded state continue from there."""
        entries = self._entries
        if not generators:
            entries.note(number, _NO_ENTRY)
            return
        known = (entry for entry, bound in entries.bound.items() if _alive(bound).items() == generators.items())
        entry = next(known, None)
        if entry is None:
            entry = entries.unbound(number, epochs_done, lambda saved: saved.keys() == generators.keys())
            entries.bind(entry, {path: weak_reference(each) for path, each in generators.items()})
            set_generators(generators, entries.saved.get(entry, {}))
        entries.note(number, entry)

    def put_back(self) -> None:
        """Set every known generator to its saved state."""
        for entry, references in self._entries.bound.items():
            set_generators(_alive(references), self._entries.saved.get(entry, {}))

    def read(self) -> dict[int, Any]:
        """The state of every generator that still exists."""
        return {entry: read_generators(_alive(to)) for entry, to in self._entries.bound.items()}

    def set(self, states: dict[int, Any]) -> None:
        """Set generators to states that were read."""
        for entry, state in states.items():
            set_generators(_alive(self._entries.bound.get(entry, {})), state)

    def state_dict(self) -> EntriesState:
        """The states of all generators, and the saved ones of those not used again yet."""
        return self._entries.state_dict(self.read())


class WorkerState:
    """The persistent workers of the followed loaders."""

    def __init__(self, state: EntriesState | None = None) -> None:
        self._entries = LoaderState(state)

    def begin_pass(self, number: int, loader: Any, kind: str, epochs_done: int) -> int:
        """A pass over this loader begins or is skipped; returns the entry of its workers."""
        entries = self._entries
        if kind not in ("map", "stream") or not loader.persistent_workers or loader.num_workers == 0:
            entries.note(number, _NO_ENTRY)
            return _NO_ENTRY
        entry = next((entry for entry, bound in entries.bound.items() if bound() is loader), None)
        if entry is None:
            entry = entries.unbound(number, epochs_done, lambda saved: saved["count"] == loader.num_workers)
            entries.bind(entry, weakref.ref(loader))
        entries.note(number, entry)
        return entry

    def take(self, entry: int) -> WorkerPlan | None:
        """The state from which the workers of `entry` continue, if they were alive at the save; returned once."""
        saved = self._entries.saved.pop(entry, None)
        if saved is None:
            return None
        return WorkerPlan({int(worker): each for worker, each in saved["states"].items()}, saved["base_seed"])

    def state_dict(self) -> EntriesState:
        """The current streams of every living worker."""
        entries = self._entries
        return entries.state_dict({entry: self._read(entry, bound()) for entry, bound in entries.bound.items()})

    def _read(self, entry: int, loader: Any) -> Any:
        if entry in self._entries.saved:  # has yet to continue from the loaded state
            return self._entries.saved[entry]
        if loader is None or not isinstance(loader._iterator, FollowedWorkers):
            return None
        plan = loader._iterator.surefoot_plan
        return {"count": loader.num_workers, "base_seed": plan.base_seed, "states": plan.plain_states()}


def _alive(references: dict[str, Callable[[], Any]]) -> Generators:
    found = {path: reference() for path, reference in references.items()}
    return {path: each for path, each in found.items() if each is not None}
