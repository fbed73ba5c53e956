"""Random streams inside data loader workers travel with the batches; here without a worker process."""

import random

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset, dataloader

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
