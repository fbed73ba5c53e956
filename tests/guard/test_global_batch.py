"""The rows of a step when the number of ranks changes. Whole runs are in `test_elastic.py`."""

import logging

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from surefoot.errors import CheckpointError
from surefoot.guard.global_batch import GlobalBatch


def loader(ranks, batch_size=4):
    rows = TensorDataset(torch.zeros(64))
    return DataLoader(rows, batch_size, sampler=DistributedSampler(rows, num_replicas=ranks, rank=0))


def saved_by(ranks, accumulate=1, batch_size=4):
    batch = GlobalBatch(accumulate, lambda _: None)
    batch.follow(loader(ranks, batch_size))
    return batch.state_dict()


def continued(state, ranks, accumulate=1, batch_size=4):
    chosen = []
    batch = GlobalBatch(accumulate, chosen.append)
    batch.load_state_dict(state)
    batch.follow(loader(ranks, batch_size))
    return chosen, batch


def test_half_as_many_ranks_accumulate_twice_as_many_microbatches():
    chosen, batch = continued(saved_by(4), ranks=2)
    assert chosen == [2]
    assert batch.state_dict() == {"given": 1, "accumulate": 2, "batch_size": 4, "replicas": 2}


def test_a_third_run_gets_the_rows_of_the_first():
    _, second = continued(saved_by(4), ranks=2)
    assert continued(second.state_dict(), ranks=1)[0] == [4]
    assert continued(second.state_dict(), ranks=4)[0] == [], "the script's own `accumulate` gives them again"


def test_the_same_number_of_ranks_changes_nothing():
    assert continued(saved_by(2), ranks=2)[0] == []


def test_rows_that_the_ranks_cannot_divide_are_an_error_that_names_the_numbers_that_can():
    with pytest.raises(CheckpointError, match=r"16 rows .* which 3 ranks cannot divide evenly. Start 1, 2 or 4 ranks"):
        continued(saved_by(4), ranks=3)


def test_another_batch_size_in_the_script_is_kept_and_logged(caplog):
    with caplog.at_level(logging.WARNING):
        assert continued(saved_by(4), ranks=4, batch_size=8)[0] == []
    assert "now uses 32 rows" in caplog.text


def test_without_a_distributed_sampler_nothing_is_known_and_nothing_is_changed():
    batch = GlobalBatch(1, lambda _: pytest.fail("it was changed"))
    batch.load_state_dict(saved_by(4))
    batch.follow(DataLoader(TensorDataset(torch.zeros(8)), 4))
    assert batch.state_dict() is None


def test_a_run_that_stops_before_it_draws_saves_the_rows_that_it_loaded():
    batch = GlobalBatch(1, lambda _: None)
    batch.load_state_dict(saved_by(4))
    assert batch.state_dict() == saved_by(4)
