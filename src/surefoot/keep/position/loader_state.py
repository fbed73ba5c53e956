"""What loaders carry from one pass to the next: their generators, and workers that stay alive between passes.

A shuffling loader with a generator of its own draws its next order from wherever the last pass left it, and with
`persistent_workers` the workers' random streams go on too. After a restart the passes that were complete are not gone
through again, so this is put back instead, when the loader is met again. A slot is one set of generators, or one
loader with persistent workers. Slots are told apart by the passes that used them.

Left out: batches that kept workers had prepared when a pass over them was broken off, if the position is saved in a
later pass over another loader. The random numbers these took are not counted.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from surefoot.keep.position.generators import read_generators, set_generators
from surefoot.keep.position.workers import FollowedWorkers, WorkerPlan

if TYPE_CHECKING:
    from collections.abc import Callable

_NO_SLOT = -1
_MOST_SLOTS = 64


class LoaderState:
    """Which pass used which slot, what was saved in each, and what each is bound to in this process."""

    def __init__(self, state: dict[str, Any] | None) -> None:
        self.of_pass: list[int] = [] if state is None else state["of_pass"].tolist()
        self.saved: dict[int, Any] = {} if state is None else {int(key): each for key, each in state["saved"].items()}
        self.bound: dict[int, Any] = {}

    def note(self, number: int, slot: int) -> None:
        """Pass `number` uses `slot`."""
        if number >= len(self.of_pass):
            self.of_pass += [_NO_SLOT] * (number - len(self.of_pass)) + [slot]

    def bind(self, slot: int, to: Any) -> None:
        """From now on `slot` stands for something in this process; the oldest of very many are forgotten."""
        self.bound[slot] = to
        for oldest in sorted(self.bound)[:-_MOST_SLOTS]:
            self.bound.pop(oldest)
            self.saved.pop(oldest, None)

    def unbound(self, number: int, epochs_done: int, fits: Callable[[Any], bool]) -> int:
        """The saved slot that pass `number` used, or that a loader met for the first time must be; else a new one.

        Finished epochs are not entered again, so their loaders are met later. What served one pass only of several
        epochs was made anew in each of them: the new one is left alone.
        """
        left = [slot for slot in self.saved if slot not in self.bound]
        if number < len(self.of_pass):
            left = [slot for slot in left if slot == self.of_pass[number]]
        else:
            left = [slot for slot in left if epochs_done < 2 or self.of_pass.count(slot) > 1]
        fitting = (slot for slot in left if fits(self.saved[slot]))
        return next(fitting, max([_NO_SLOT, *self.of_pass, *self.saved, *self.bound]) + 1)

    def state_dict(self, current: dict[int, Any]) -> dict[str, Any]:
        """Tensors and plain values; what is not bound here stays as it was loaded."""
        states = {slot: saved for slot, saved in self.saved.items() if slot not in self.bound} | current
        return {
            "of_pass": torch.tensor(self.of_pass, dtype=torch.int32),
            "saved": {slot: saved for slot, saved in states.items() if saved},
        }


class GeneratorState:
    """The generators of the loaders that were followed."""

    def __init__(self, state: dict[str, Any] | None = None) -> None:
        self._slots = LoaderState(state)

    def meet(self, number: int, generators: dict[str, Any], epochs_done: int) -> None:
        """A pass begins over a loader with these generators; those of a loaded state go on where they were saved."""
        slots = self._slots
        if not generators:
            slots.note(number, _NO_SLOT)
            return
        known = (slot for slot, bound in slots.bound.items() if _alive(bound).items() == generators.items())
        slot = next(known, None)
        if slot is None:
            slot = slots.unbound(number, epochs_done, lambda saved: saved.keys() == generators.keys())
            slots.bind(slot, {path: _reference(each) for path, each in generators.items()})
            set_generators(generators, slots.saved.get(slot, {}))
        slots.note(number, slot)

    def put_back(self) -> None:
        """Set every generator met so far to where it was saved."""
        for slot, references in self._slots.bound.items():
            set_generators(_alive(references), self._slots.saved.get(slot, {}))

    def read(self) -> dict[int, Any]:
        """Where every generator is now; one that is gone is left out."""
        return {slot: read_generators(_alive(to)) for slot, to in self._slots.bound.items()}

    def set(self, states: dict[int, Any]) -> None:
        """Set generators to where they were read."""
        for slot, state in states.items():
            set_generators(_alive(self._slots.bound[slot]), state)

    def state_dict(self) -> dict[str, Any]:
        """Where every generator is now, and those saved that have not been met again."""
        return self._slots.state_dict(self.read())


class WorkerState:
    """The persistent workers of the loaders that were followed."""

    def __init__(self, state: dict[str, Any] | None = None) -> None:
        self._slots = LoaderState(state)

    def meet(self, number: int, loader: Any, kind: str, epochs_done: int) -> int:
        """A pass begins, or is passed over, with this loader; the slot of its workers."""
        slots = self._slots
        if kind not in ("map", "stream") or not loader.persistent_workers or loader.num_workers == 0:
            slots.note(number, _NO_SLOT)
            return _NO_SLOT
        slot = next((slot for slot, bound in slots.bound.items() if bound() is loader), None)
        if slot is None:
            slot = slots.unbound(number, epochs_done, lambda saved: saved["count"] == loader.num_workers)
            slots.bind(slot, weakref.ref(loader))
        slots.note(number, slot)
        return slot

    def take(self, slot: int) -> WorkerPlan | None:
        """How the workers of `slot` go on, if they were alive when the state was saved; once."""
        saved = self._slots.saved.pop(slot, None)
        if saved is None:
            return None
        return WorkerPlan({int(worker): each for worker, each in saved["states"].items()}, saved["base_seed"])

    def state_dict(self) -> dict[str, Any]:
        """Where the streams of every worker that is alive are now."""
        slots = self._slots
        return slots.state_dict({slot: self._read(slot, bound()) for slot, bound in slots.bound.items()})

    def _read(self, slot: int, loader: Any) -> Any:
        if slot in self._slots.saved:  # still to go on from what was loaded
            return self._slots.saved[slot]
        if loader is None or not isinstance(loader._iterator, FollowedWorkers):
            return None
        plan = loader._iterator.surefoot_plan
        return {"count": loader.num_workers, "base_seed": plan.base_seed, "states": plan.plain_states()}


def _reference(generator: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(generator)
    except TypeError:  # NumPy's cannot be referred to weakly
        return lambda: generator


def _alive(references: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    found = {path: reference() for path, reference in references.items()}
    return {path: each for path, each in found.items() if each is not None}
