"""What may be read of a tensor in this process alone."""

import pytest
import torch
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from surefoot.observe.readable import has_other_ranks, is_readable, is_sharded, readable


def freed(view=lambda tensor: tensor):
    """A tensor whose memory was given back, as FSDP does it."""
    tensor = torch.ones(4)
    seen = view(tensor)
    tensor.untyped_storage().resize_(0)
    return seen


class Named(torch.Tensor):
    """A class of the script's own that only adds a name."""


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(2), nn.Parameter(torch.ones(2)), torch.ones(3, 2).t(), torch.ones(0), torch.ones(4)[1:3],
     torch.ones(2).to_sparse(), torch.ones(2).as_subclass(Named)],
    ids=["plain", "parameter", "transposed", "empty", "slice", "sparse", "subclass"],
)  # fmt: skip
def test_memory_that_is_there_is_read_as_it_is(tensor):
    assert readable(tensor) is tensor
    assert is_readable(tensor)


@pytest.mark.parametrize(
    "tensor", [freed(), freed(lambda tensor: tensor[1:3]), torch.ones(2, device="meta"), nn.UninitializedParameter()],
    ids=["freed", "slice of freed", "meta", "lazy"],
)  # fmt: skip
def test_memory_that_is_not_there_is_not_read(tensor):
    assert readable(tensor) is None
    assert not is_readable(tensor)


def test_a_process_alone_has_no_company_and_plain_tensors_are_not_sharded():
    assert not has_other_ranks()
    assert not is_sharded(nn.Parameter(torch.ones(1)))


@pytest.mark.parametrize("count", [1, 2])
def test_a_group_of_one_rank_has_no_company_either(count):
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        assert has_other_ranks() is (count > 1)
    finally:
        torch.distributed.destroy_process_group()
