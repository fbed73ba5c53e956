"""Under DDP every rank but the first leaves parameters and optimizer out, and takes them from the first on loading."""

import pytest
import torch
from torch import nn

from surefoot.errors import CheckpointError
from surefoot.keep.replicated_state import insert_copies, lacks_copies, leave_out_copies


def state(value):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.fill_(value)
    return model, {"models": [model.state_dict()], "optimizer": {"lr": value}}


def test_buffers_are_each_ranks_own_and_the_rest_is_that_of_the_first():
    _, first = state(1)
    model, second = state(2)
    leave_out_copies(second, [model])
    assert lacks_copies(second)
    assert set(second["models"][0]) == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    insert_copies(second, first)
    assert not lacks_copies(second)
    assert second["optimizer"] == {"lr": 1}
    loaded = second["models"][0]
    assert (loaded["0.weight"] == 1).all()
    assert (loaded["1.running_mean"] == 2).all()
    assert (first["models"][0]["1.running_mean"] == 1).all()


@pytest.mark.parametrize("first", [{}, {"models": [], "optimizer": {}}, "damaged"])
def test_a_first_part_that_does_not_have_them_either_is_refused(first):
    model, second = state(2)
    leave_out_copies(second, [model])
    with pytest.raises(CheckpointError, match="the part of rank 0 does not contain the models and the optimizer"):
        insert_copies(second, first)


def test_a_part_of_another_rank_is_not_the_first():
    model, second = state(2)
    leave_out_copies(second, [model])
    with pytest.raises(CheckpointError, match="it is not the first rank's"):
        insert_copies(second, second)
