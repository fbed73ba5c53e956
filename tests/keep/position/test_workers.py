"""Random streams inside data loader workers travel with the batches; here without a worker process."""

import os
import random
import signal
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset, dataloader

import patience
from surefoot.keep.position import workers
from surefoot.keep.position.workers import Carried, StreamCarrier, WorkerPlan, replaced, worker_died, workers_followed


def test_a_batch_carries_the_streams_that_have_moved_and_nothing_otherwise():
    carrier = StreamCarrier(list, None, {})
    carrier.start(worker=1)
    assert carrier.collate((1, 2)) == [1, 2]
    random.random()
    carried = carrier.collate((3,))
    assert type(carried) is Carried
    assert (carried.batch, carried.worker) == ([3], 1)
    assert len(carried.states) == 1


def test_the_streams_of_a_worker_continue_where_its_last_batch_left_them():
    carrier = StreamCarrier(list, None, {})
    carrier.start(worker=0)
    random.random()
    plan = WorkerPlan()
    assert plan.receive(carrier.collate((1,))) == [1]
    expected = random.random()
    StreamCarrier(list, lambda worker: random.seed(worker), plan.plain_states()).start(worker=0)
    assert random.random() == expected


def test_a_plan_keeps_the_latest_state_of_each_stream():
    plan = WorkerPlan()
    plan.receive(Carried("batch", 0, {"python": ["a"], "numpy": ["b"]}))
    plan.receive(Carried("batch", 0, {"python": ["c"]}))
    assert plan.states == {0: {"python": ["c"], "numpy": ["b"]}}
    copied = plan.plain_states()
    plan.receive(Carried("batch", 0, {"python": ["d"]}))
    assert copied == {0: {"python": ["c"], "numpy": ["b"]}}


def test_a_loader_and_torch_are_as_before_after_its_workers_were_prepared():
    loader = DataLoader(TensorDataset(torch.zeros(2)), num_workers=0)
    before = loader.collate_fn, loader.worker_init_fn, dataloader._MultiProcessingDataLoaderIter
    with workers_followed(loader, WorkerPlan()):
        assert loader.collate_fn is not before[0]
        assert dataloader._MultiProcessingDataLoaderIter is not before[2]
    assert (loader.collate_fn, loader.worker_init_fn, dataloader._MultiProcessingDataLoaderIter) == before


def test_a_replaced_name_comes_back_after_an_error():
    names = {"a": 1}
    with pytest.raises(ZeroDivisionError) as caught, replaced(names, "a", 0):
        1 / names["a"]
    assert names == {"a": 1}
    assert not worker_died(caught.value)


class StopsWithTheLock(torch.utils.data.Dataset):
    """A worker that is stopped while it holds the lock of the event that ends the workers."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 2:
            frame = sys._getframe()
            while frame is not None and "done_event" not in frame.f_locals:
                frame = frame.f_back
            frame.f_locals["done_event"]._cond.acquire()
            os.kill(os.getpid(), signal.SIGSTOP)
        return index


def test_a_stopped_worker_that_holds_a_lock_is_killed_and_the_run_goes_on(monkeypatch, caplog):
    monkeypatch.setattr(workers, "STOPPED_SECONDS", 0.5)
    loader = DataLoader(StopsWithTheLock(), batch_size=1, num_workers=2, prefetch_factor=1)
    with workers_followed(loader, WorkerPlan()):
        batches = iter(loader)
    processes = batches._workers
    assert [int(next(batches)), int(next(batches))] == [0, 1]
    stat = Path(f"/proc/{processes[0].pid}/stat")
    patience.wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")
    batches._shutdown_workers()
    assert not any(process.is_alive() for process in processes)
    assert "one of them holds a lock, and is probably stopped" in caplog.text
