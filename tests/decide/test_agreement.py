"""Ranks agree before anyone acts: one process, in a group and without. `test_*_on_ranks.py` have several."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from surefoot.decide.agreement import (
    Ranks,
    add_up,
    agree,
    agree_and_average,
    average_gradients,
    copies_of_first,
    find_group,
    set_gradient_sync,
)

CPU = torch.device("cpu")


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_process_alone_agrees_with_itself():
    alone = Ranks(None, CPU)
    assert (alone.place, alone.count, alone.several) == (0, 1, False)
    assert alone.any(True)
    assert not alone.any(False)
    assert alone.same(7)
    assert alone.of_first(-1) == -1
    flags = torch.tensor([True, False])
    assert agree(flags, None) is flags
    assert add_up(flags, None) is flags


def test_a_group_of_one_gives_what_a_process_alone_has(group):
    ranks = Ranks(group, CPU)
    assert (ranks.place, ranks.count, ranks.several) == (0, 1, True)
    assert ranks.any(True)
    assert ranks.same(-3)
    assert ranks.of_first(5) == 5
    assert agree(torch.tensor([True, False]), group).tolist() == [True, False]


def test_flags_and_the_mean_loss_share_one_collective(group):
    flags, mean = agree_and_average([True, torch.tensor(0.0)], torch.tensor(2.5), CPU, group)
    assert flags.tolist() == [True, False]
    assert mean.item() == 2.5
    _, nothing = agree_and_average([False], None, CPU, group)
    assert nothing.isnan()


def test_a_model_that_merely_lives_beside_a_group_trains_alone(group):
    assert find_group([nn.Linear(1, 1)]) is None


def test_only_plain_ddp_holds_copies_of_the_first_rank(group):
    model = nn.Linear(2, 1)
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    assert copies_of_first([wrapped], optimizer)
    assert not copies_of_first([model], optimizer)
    optimizer.add_param_group({"params": nn.Linear(1, 1).parameters()})
    assert not copies_of_first([wrapped], optimizer)


def test_gradient_averaging_is_switched_off_for_a_microbatch(group):
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
    set_gradient_sync([model, nn.Linear(1, 1)], False)
    assert not model.require_backward_grad_sync
    set_gradient_sync([model], True)
    gradient = torch.tensor([2.0])
    average_gradients([gradient], group)
    assert gradient.tolist() == [2.0]
