"""Writes are known per storage, and no tensor is kept alive."""

import weakref

import torch

from surefoot.replay.locate.describe import Counts
from surefoot.replay.locate.memory_writes import MemoryWrite, MemoryWrites, same_storage


def bad(index=0):
    return MemoryWrite(index, "aten.log.default", "forward", Counts(nan=1), 3)


def test_a_view_shares_what_is_known_of_its_storage():
    writes, x, record = MemoryWrites(), torch.ones(3), bad()
    writes.write(x, record)
    assert writes.find(x[:1]).writers == [record]
    assert same_storage(x, x.view(3, 1))
    assert not same_storage(x, x.clone())
    assert writes.find(torch.ones(3)) is None


def test_a_sound_write_clears_only_what_it_covers():
    writes, x = MemoryWrites(), torch.ones(3)
    writes.write(x, bad())
    writes.write(x[:1], None)
    assert writes.find(x).writers
    writes.write(x, None)
    assert writes.find(x).writers == []


def test_blank_memory_remembers_who_left_it():
    writes, x, blank = MemoryWrites(), torch.ones(3), bad(4)
    writes.write(x, None, blank=blank)
    assert writes.find(x).blank is blank
    writes.write(x, None)
    assert writes.find(x).blank is None


def test_tensors_die_as_they_would_have():
    writes, x = MemoryWrites(), torch.ones(3)
    writes.add(x, external=True)
    gone = weakref.ref(x)
    del x
    assert gone() is None


def test_nan_out_of_infinities_begins_here():
    assert bad().makes_nan
    assert not MemoryWrite(0, "op", "forward", Counts(nan=1), 1, input_nan=True).makes_nan
