"""Every batch that a `DataLoader` hands out in this process is reported, to listeners that are referred to weakly."""

import gc

import torch
from torch.utils.data import DataLoader, TensorDataset

from surefoot.record.incidents import loader_batches
from surefoot.record.incidents.loader_batches import add_listener


class Listener:
    def __init__(self, seen, change=lambda batch: batch):
        self.seen, self.change = seen, change

    def loader_drew(self, batch):
        self.seen.append(batch)
        return self.change(batch)


LOADER = DataLoader(TensorDataset(torch.arange(3.0)))


def test_a_listener_hears_of_every_batch_as_long_as_it_lives():
    seen = []
    listener = Listener(seen)
    add_listener(listener)
    handed_out = list(LOADER)
    assert len(seen) == 3
    assert all(noted is batch for noted, batch in zip(seen, handed_out, strict=True))
    del listener
    gc.collect()
    list(LOADER)
    assert len(seen) == 3


def test_a_listener_may_hand_out_something_else():
    listener = Listener([], lambda batch: "replaced")
    add_listener(listener)
    assert list(LOADER) == ["replaced"] * 3


def test_dead_listeners_are_forgotten():
    add_listener(Listener([]))
    gc.collect()
    alive = Listener([])
    add_listener(alive)
    assert all(reference() is not None for reference in loader_batches._listeners)
