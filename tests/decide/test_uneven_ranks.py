"""Ranks that run different numbers of forwards: which models can, and what is put back afterwards."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from counted import collectives_of
from surefoot.decide.uneven_ranks import check_separable, without_collectives
from surefoot.errors import UsageError


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def ddp(**settings):
    return nn.parallel.DistributedDataParallel(nn.Linear(2, 1), **settings)


def test_a_plain_model_and_plain_ddp_can(group):
    check_separable([nn.Linear(2, 1), ddp()])


@pytest.mark.parametrize("settings", [{"static_graph": True}, {"delay_all_reduce_named_params": True}])
def test_ddp_that_averages_in_another_way_is_refused(group, settings):
    if "delay_all_reduce_named_params" in settings:
        model = nn.Linear(2, 1)
        named = list(model.named_parameters())
        wrapped = nn.parallel.DistributedDataParallel(
            model, delay_all_reduce_named_params=named[:1], param_to_hook_all_reduce=named[1][1]
        )
    else:
        wrapped = ddp(**settings)
    with pytest.raises(UsageError, match="DDP was built with"):
        check_separable([wrapped])


def test_a_communication_hook_would_not_be_called(group):
    model = ddp()
    model.register_comm_hook(None, lambda state, bucket: torch.futures.Future())
    with pytest.raises(UsageError, match="communication hook"):
        check_separable([model])


def test_the_body_runs_without_a_collective_and_gradients_are_averaged_at_the_end(group):
    model = ddp()
    with without_collectives([model], group, average=True):
        assert not model.require_backward_grad_sync
        model.module(torch.ones(1, 2)).sum().backward()
    assert model.require_backward_grad_sync
    assert model.module.weight.grad.tolist() == [[1.0, 1.0]]


def test_buffers_are_broadcast_once_before_the_body_and_by_no_forward_in_it(group):
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1)))
    before = collectives_of(group)
    with without_collectives([model], group, average=True):
        begun = collectives_of(group)
        for _ in range(2):
            model(torch.randn(4, 2)).sum().backward()
        assert collectives_of(group) == begun > before


def test_ddp_is_as_before_after_a_body_that_raises(group):
    model = ddp()
    with pytest.raises(ZeroDivisionError), without_collectives([model], group, average=True):
        1 / len([])
    assert model.require_backward_grad_sync
