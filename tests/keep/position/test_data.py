"""A run that is taken up again sees the batches and the random numbers of the run that was never interrupted."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, WeightedRandomSampler

from surefoot.core.random_state import read_streams, set_streams
from surefoot.keep.position.data import DataPosition, EpochLoops

SAMPLES = 14
PLAIN = (type(None), bool, int, float, str, bytes, torch.Tensor)


class Numbers(Dataset):
    """Rows that know their index, with random augmentation from every stream or without."""

    def __init__(self, augment: bool = False, seed: int | None = None) -> None:
        self.augment = augment
        self.rng = None if seed is None else np.random.default_rng(seed)
        self.loaded = 0

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        self.loaded += 1
        row = [float(index)]
        if self.augment:
            row += [torch.rand(()).item(), np.random.rand(), random.random(), random.gauss(0, 1)]
        if self.rng is not None:
            row.append(self.rng.random())
        return torch.tensor(row, dtype=torch.float64)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def options(kind: str, data: Numbers, seed: int) -> dict[str, Any]:
    """The settings of a loader that draws its order in one of the usual ways."""
    weights = [1.0 + index for index in range(SAMPLES)]
    return {
        "sequential": lambda: {"batch_size": 3},
        "shuffled": lambda: {"batch_size": 3, "shuffle": True},
        "own generator": lambda: {"batch_size": 3, "shuffle": True, "generator": generator(seed)},
        "weighted": lambda: {"batch_size": 3, "sampler": WeightedRandomSampler(weights, SAMPLES)},
        "with replacement": lambda: {
            "batch_size": 3,
            "sampler": RandomSampler(data, replacement=True, num_samples=SAMPLES, generator=generator(seed)),
        },
        "batch sampler": lambda: {"batch_sampler": BatchSampler(RandomSampler(data), 4, drop_last=True)},
        "single": lambda: {"batch_size": None, "shuffle": True},
    }[kind]()


ORDERS = ["sequential", "shuffled", "own generator", "weighted", "with replacement", "batch sampler", "single"]


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def draw() -> tuple[float, ...]:
    """What a model would draw during a step."""
    return (torch.rand(()).item(), np.random.rand(), random.random())


def round_trip(state: Any) -> Any:
    """What a file without pickle gives back."""
    if isinstance(state, dict):
        assert all(isinstance(key, (str, int)) for key in state)
        return {key: round_trip(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [round_trip(value) for value in state]
    assert isinstance(state, PLAIN), type(state)
    return copy.deepcopy(state)


def listed(batch: Any) -> Any:
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


class Script:
    """A training script: the same from its top each time, whatever it is seeded with."""

    def __init__(self, make: Any, passes: int, seed: int, saved: Any = None, style: str = "range") -> None:
        seed_all(seed)
        self.make, self.passes, self.style = make, passes, style
        self.loader = make(seed)
        self.position = DataPosition()
        self.streams = None
        if saved is not None:
            state, self.streams = saved
            self.position.load_state_dict(state)
        self.saves: list[Any] = []
        self.seen: list[Any] = []

    def reached(self) -> None:
        assert self.streams is not None, "only a resumed run has streams to set"
        set_streams(self.streams)
        self.streams = None

    def save(self) -> None:
        self.saves.append((len(self.seen), round_trip((self.position.state_dict(), read_streams()))))

    def batches(self) -> Any:
        after = self.reached if self.streams is not None else None
        if self.style == "bare":
            return self.loader
        return self.position.follow(self.loader, self.passes if self.style == "chain" else 1, after)

    def epochs(self) -> Any:
        if self.style == "epochs":
            return self.position.epochs(self.passes, self.reached if self.streams is not None else None)
        return range(1 if self.style == "chain" else self.passes)

    def run(self, saving: bool = False) -> Script:
        if saving:
            self.save()
        for _ in self.epochs():
            for batch in self.batches():
                self.seen.append((listed(batch), draw()))
                if saving:
                    self.save()
            if saving:
                self.save()
        self.seen.append(draw())
        return self


def check_every_resume(make: Any, passes: int, style: str = "range", only: slice = slice(None)) -> None:
    whole = Script(make, passes, seed=1, style=style).run(saving=True)
    bare = Script(make, passes, seed=1, style="bare").run()
    assert whole.seen == bare.seen
    for done, saved in whole.saves[only]:
        resumed = Script(make, passes, seed=977, saved=saved, style=style).run()
        assert resumed.seen == whole.seen[done:], f"after {done} batches"


@pytest.mark.parametrize("augment", [False, True])
@pytest.mark.parametrize("order", ORDERS)
def test_every_place_in_three_passes_is_found_again(order, augment):
    def make(seed):
        data = Numbers(augment)
        return DataLoader(data, **options(order, data, seed))

    # Before the first pass nobody knows of the loader, so a generator of its own begins as the script seeds it.
    own = order in ("own generator", "with replacement")
    check_every_resume(make, 3, only=slice(own, None))


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("order", ["shuffled", "own generator", "batch sampler", "single"])
def test_random_augmentation_in_workers_continues(order, persistent):
    def make(seed):
        data = Numbers(augment=True)
        return DataLoader(data, num_workers=2, persistent_workers=persistent, **options(order, data, seed))

    # In the middle of passes, and between two of them.
    places = {"single": slice(4, None, 13), "batch sampler": slice(3, None, 5)}.get(order, slice(2, None, 5))
    check_every_resume(make, 3, only=places)


@pytest.mark.parametrize("style", ["epochs", "chain"])
@pytest.mark.parametrize("order", ["shuffled", "own generator"])
def test_epochs_that_are_done_are_not_entered_again(style, order):
    def make(seed):
        data = Numbers(augment=True)
        return DataLoader(data, **options(order, data, seed))

    check_every_resume(make, 3, style, slice(order == "own generator", None))


def test_a_loop_begins_at_its_first_epoch_and_counts():
    loops = EpochLoops()
    assert loops.enter(next_pass=0) == (0, 0)
    loops.epoch_over(next_pass=1)
    loops.epoch_over(next_pass=2)
    assert loops.done == 2
    assert loops.nested
    loops.leave(next_pass=2, finished=True)
    assert not loops.nested


def test_a_loop_under_way_continues_with_the_epoch_it_was_in():
    loops = EpochLoops()
    loops.enter(0)
    loops.epoch_over(3)
    resumed = EpochLoops(loops.state_dict())
    assert resumed.enter(0) == (1, 3)


def test_a_finished_loop_is_not_entered_again_and_the_next_one_is():
    loops = EpochLoops()
    loops.enter(0)
    loops.epoch_over(2)
    loops.leave(2, finished=True)
    resumed = EpochLoops(loops.state_dict())
    assert resumed.enter(0) is None
    assert resumed.end_of_last_entered() == 2
    assert resumed.enter(2) == (0, 2)


def test_a_loop_that_was_broken_out_of_ends_when_something_new_begins():
    loops = EpochLoops()
    loops.enter(0)
    loops.epoch_over(1)
    loops.leave(1, finished=False)
    assert loops.state_dict()["under_way"]  # the program may be ending
    loops.settle()
    assert not loops.state_dict()["under_way"]
    assert EpochLoops(loops.state_dict()).enter(0) is None
