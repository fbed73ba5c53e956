"""Which checkpoint to load, the same on every rank. Here one process, alone and in a group of its own."""

import pytest
import torch
import torch.distributed as dist

import surefoot as sf
from surefoot.decide.agreement import Ranks
from surefoot.errors import CheckpointError
from surefoot.keep.checkpoint.listing import part_name
from surefoot.keep.checkpoint.manifest import TENSORS
from surefoot.keep.checkpoint.selection import CheckpointSelector

CPU = torch.device("cpu")


@pytest.fixture(params=["alone", "group"])
def ranks(request, tmp_path):
    if request.param == "alone":
        yield Ranks(None, CPU)
        return
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield Ranks(dist.group.WORLD, CPU)
    dist.destroy_process_group()


@pytest.fixture
def manager(tmp_path):
    made = sf.CheckpointManager(tmp_path / "run")
    for step in (10, 20):
        made.save({"weight": torch.full((2,), float(step))}, step, blocking=True)
    return made


def damage(manager, step):
    path = manager.folder / "checkpoints" / part_name(step, 0) / TENSORS
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_the_newest_is_loaded_or_the_one_asked_for(manager, ranks):
    selector = CheckpointSelector(manager, ranks, None)
    selector.check_that_all_save()
    assert selector.load("latest").step == 20
    assert selector.load(10).tree["weight"].tolist() == [10.0, 10.0]


def test_a_damaged_one_is_passed_over(manager, ranks):
    damage(manager, 20)
    assert CheckpointSelector(manager, ranks, None).load("latest").step == 10


def test_where_all_are_damaged_every_rank_stops(manager, ranks):
    damage(manager, 10)
    damage(manager, 20)
    with pytest.raises(CheckpointError, match="can be loaded"):
        CheckpointSelector(manager, ranks, None).load("latest")


def test_a_new_run_has_nothing_to_load(tmp_path, ranks):
    assert CheckpointSelector(sf.CheckpointManager(tmp_path / "new"), ranks, None).load("latest") is None
