"""Where a data position could go wrong: other loaders, other orders of use, failures, and what must not be touched."""

from __future__ import annotations

import gc
import logging
import random
import weakref

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, get_worker_info
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from surefoot.errors import SettingError, UsageError
from surefoot.keep.position.data import DataPosition
from surefoot.keep.position.generators import find_generators, read_generators, set_generators
from surefoot.keep.position.workers import Carried, WorkerPlan

ROWS = [float(row) for row in range(12)]


class Noisy:
    """Rows with noise from generators of its own, or from the worker's streams."""

    def __init__(self, seed: int | None = None) -> None:
        self.rng = None if seed is None else np.random.default_rng(seed)

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, index: int) -> tuple[float, float]:
        return ROWS[index], random.random() if self.rng is None else self.rng.random()


class Stream(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        for row in ROWS[info.id if info else 0 :: info.num_workers if info else 1]:
            yield row, random.random()


class Failing(Noisy):
    def __getitem__(self, index: int) -> tuple[float, float]:
        if index == 5:
            raise KeyError("row 5 is missing")
        return super().__getitem__(index)


def as_is(rows):
    return rows


def loader(data=None, **settings) -> DataLoader:
    return DataLoader(Noisy() if data is None else data, collate_fn=as_is, **{"batch_size": 2, **settings})


def moved(position: DataPosition) -> DataPosition:
    resumed = DataPosition()
    resumed.load_state_dict(position.state_dict())
    return resumed


def first(position: DataPosition, source, count: int) -> list:
    """Break out of a pass after `count` batches."""
    seen = []
    for batch in position.follow(source):
        seen.append(batch)
        if len(seen) == count:
            break
    return seen


def rows(batches) -> list[float]:
    return [row for batch in batches for row, _ in batch]


def test_a_pass_that_was_broken_off_continues_until_a_new_one_begins():
    position = DataPosition()
    first(position, loader(), 2)
    assert rows(moved(position).follow(loader())) == ROWS[4:]
    first(position, loader(), 1)
    resumed = moved(position)
    assert list(resumed.follow(loader())) == []
    assert rows(resumed.follow(loader())) == ROWS[2:]


def test_two_loaders_are_distinguished_by_their_order():
    position, other = DataPosition(), [(100.0, 0.0), (101.0, 0.0)]
    list(position.follow(loader()))
    first(position, [other, other], 1)
    resumed = moved(position)
    assert list(resumed.follow(loader())) == []
    assert list(resumed.follow([other, other])) == [other]
    assert rows(resumed.follow(loader())) == ROWS


def test_two_loaders_side_by_side_both_find_their_place():
    def pairs(position):
        return zip(
            position.follow(loader(Noisy(seed=3))), position.follow(loader(shuffle=True), 1, again), strict=False
        )

    calls = []
    again = lambda: calls.append(position.pending)  # noqa: E731
    random.seed(1)
    torch.manual_seed(1)
    position = DataPosition()
    seen = []
    for number, pair in enumerate(pairs(position)):
        seen.append(pair)
        if number == 2:
            state, streams = position.state_dict(), random.getstate()
    torch.manual_seed(99)
    again = lambda: random.setstate(streams)  # noqa: E731
    position = DataPosition()
    position.load_state_dict(state)
    assert list(pairs(position)) == seen[3:]
    assert calls == []


def test_a_position_that_was_found_again_can_be_saved_again():
    position = DataPosition()
    first(position, loader(num_workers=2), 2)
    position = moved(position)
    first(position, loader(num_workers=2), 2)
    assert rows(moved(position).follow(loader(num_workers=2))) == ROWS[8:]


def test_a_state_saved_before_the_place_is_reached_is_the_loaded_one():
    position = DataPosition()
    first(position, loader(), 2)
    resumed = moved(position)
    assert resumed.pending
    assert rows(moved(resumed).follow(loader())) == ROWS[4:]


def test_the_length_is_what_is_left():
    position = DataPosition()
    assert len(position.follow(loader())) == 6
    first(position, loader(), 2)
    resumed = moved(position)
    assert len(resumed.follow(loader())) == 4
    assert len(resumed.follow(loader(), epochs=3)) == 16
    followed = resumed.follow(loader(), epochs=3)
    batches = iter(followed)
    next(batches)
    assert len(followed) == 15
    assert not hasattr(position.follow(iter([])), "__len__")


def test_chained_passes_tell_the_sampler_their_epoch():
    def make():
        return loader(sampler=DistributedSampler(Noisy(), num_replicas=2, rank=0, seed=7))

    bare = []
    source = make()
    for epoch in range(3):
        source.sampler.set_epoch(epoch)
        bare += rows(source)
    position = DataPosition()
    batches = position.follow(make(), epochs=3)
    seen = rows(batch for batch, _ in zip(batches, range(5), strict=False))
    assert seen == bare[:10]
    # `zip` had asked for one more batch than it handed on.
    assert rows(moved(position).follow(make(), epochs=3)) == bare[12:]


def test_loops_over_epochs_are_distinguished_by_their_order():
    def phases(position, stop=None):
        seen = []
        for phase in range(2):
            for epoch in position.epochs(3):
                for batch in position.follow(loader()):
                    seen.append((phase, epoch, rows([batch])))
                    if len(seen) == stop:
                        return seen
            for batch in position.follow([[(-1.0, 0.0)]]):
                seen.append((phase, None, rows([batch])))
                if len(seen) == stop:
                    return seen
        return seen

    whole = phases(DataPosition())
    assert len(whole) == 2 * (3 * 6 + 1)
    for stop in (1, 6, 7, 18, 19, 20, 25, 37, 38):
        position = DataPosition()
        phases(position, stop)
        assert phases(moved(position)) == whole[stop:], stop


def test_a_loop_over_epochs_that_was_broken_out_of_is_over_once_something_new_begins():
    def script(position, stop=None):
        seen = []
        for epoch in position.epochs(3):
            seen += [(epoch, row) for row in rows(position.follow(loader()))]
            if epoch == 1:
                break
        for batch in position.follow(loader()):
            seen.append(rows([batch]))
            if len(batch) == stop:
                break
        return seen

    position = DataPosition()
    script(position, stop=2)
    assert script(moved(position)) == [[row, row + 1] for row in ROWS[2::2]]


def test_what_cannot_begin_in_the_middle_is_consumed_and_that_is_said_unless_its_batches_exist_already(caplog):
    kinds = [
        (lambda: list(ROWS), []),
        (lambda: (row for row in ROWS), ["WARNING"]),
        (lambda: loader(Stream()), ["WARNING"]),
    ]
    for make, levels in kinds:
        position = DataPosition()
        seen = first(position, make(), 3)
        whole = list(make())
        assert len(seen) == 3
        caplog.clear()
        assert len(list(moved(position).follow(make()))) == len(whole) - 3
        assert [record.levelname for record in caplog.records] == levels
        assert ("3 batches" in caplog.text) == bool(levels)


@pytest.mark.parametrize("persistent", [False, True])
def test_an_iterable_data_set_in_workers_continues_exactly(persistent):
    def run(position, source, stop=None):
        seen = []
        for _ in range(2):
            for batch in position.follow(source):
                seen.append(batch)
                if len(seen) == stop:
                    return seen
        return seen

    def make():
        return loader(Stream(), num_workers=2, persistent_workers=persistent)

    torch.manual_seed(5)
    whole = run(DataPosition(), make())
    for stop in (2, 9):
        torch.manual_seed(5)
        position = DataPosition()
        run(position, make(), stop)
        torch.manual_seed(6)
        assert run(moved(position), make()) == whole[stop:]


def test_another_loader_is_reported_and_a_place_beyond_its_end_is_an_error(caplog):
    position = DataPosition()
    first(position, loader(), 4)
    assert rows(moved(position).follow(loader(batch_size=4))) == ROWS[8:]
    assert "batch_size=4" in caplog.text
    assert "batch_size=2" in caplog.text
    caplog.clear()
    assert rows(moved(position).follow(loader(num_workers=2))) == ROWS[8:]
    assert "start again" in caplog.text
    with pytest.raises(UsageError, match="after batch 4 of the pass, but the loader ends after 3"):
        list(moved(position).follow(loader(Noisy(), sampler=range(6))))
    with pytest.raises(SettingError, match="schema"):
        DataPosition().load_state_dict({"schema": 99})


def test_an_order_that_depends_on_the_loop_is_noticed_and_others_are_not(caplog):
    class Drawing:
        def __iter__(self):
            return iter([random.randrange(12)] for _ in range(8))

    def run(position, draw, stop):
        for number, _ in enumerate(position.follow(loader(Noisy(seed=1), batch_sampler=Drawing(), batch_size=1)), 1):
            draw()
            if number == stop:
                return

    for draw, expected in ((lambda: random.random(), True), (lambda: torch.rand(()), False)):
        caplog.clear()
        position = DataPosition()
        with caplog.at_level(logging.WARNING):
            run(position, draw, 4)
            assert caplog.text == ""
            run(moved(position), draw, 1)
        assert ("the same random stream (random)" in caplog.text) is expected


def test_a_batch_that_fails_is_tried_again_after_a_restart():
    position = DataPosition()
    batches = iter(position.follow(loader(Failing())))
    next(batches)
    next(batches)
    with pytest.raises(KeyError, match="row 5 is missing"):
        next(batches)
    assert rows(moved(position).follow(loader())) == ROWS[4:]
    next(batches)  # the loop went on after it
    assert rows(moved(position).follow(loader())) == ROWS[8:]


def test_kept_workers_give_plain_batches_to_everyone():
    source = loader(num_workers=2, persistent_workers=True)
    position = DataPosition()
    first(position, source, 1)
    assert rows(source) == ROWS
    assert rows(moved(position).follow(source)) == ROWS[2:]
    assert rows(source) == ROWS
    assert source.collate_fn is as_is
    assert source.worker_init_fn is None
    assert torch.utils.data.dataloader._MultiProcessingDataLoaderIter is _MultiProcessingDataLoaderIter


def test_nothing_of_a_pass_is_held_after_it():
    position, source = DataPosition(), loader(num_workers=1)
    batches = iter(position.follow(source))
    next(batches)
    inner, workers = weakref.ref(batches._inner), batches._inner._workers
    gc.disable()
    try:
        del batches
        assert inner() is None
        assert not any(worker.is_alive() for worker in workers)
    finally:
        gc.enable()


def test_a_batch_with_streams_is_pinned_as_it_would_be_alone():
    class Pinnable:
        pinned = False

        def pin_memory(self):
            self.pinned = True
            return self

    plan = WorkerPlan()
    batch = plan.receive(Carried(Pinnable(), 1, {"python": ["state"]}).pin_memory())
    assert batch.pinned
    assert plan.states == {1: {"python": ["state"]}}


def test_every_kind_of_generator_continues_where_it_was_read():
    class Holder:
        def __init__(self, seed):
            self.parts = [torch.Generator().manual_seed(seed), random.Random(seed), np.random.RandomState(seed)]
            kinds = (np.random.PCG64, np.random.MT19937, np.random.Philox, np.random.SFC64)
            self.bits = {kind.__name__: np.random.Generator(kind(seed)) for kind in kinds}
            self.closure = lambda: self.parts

        def draw(self):
            one, two, three = self.parts
            old = [torch.rand(1, generator=one).item(), two.gauss(0, 1), three.randn()]
            return [*old, *(each.standard_normal(dtype="f") for each in self.bits.values())]

    one, other = Holder(1), Holder(2)
    assert len(find_generators(one)) == 7
    one.draw()
    set_generators(find_generators(other), read_generators(find_generators(one)))
    assert one.draw() == other.draw()
    assert one.draw() == other.draw()
