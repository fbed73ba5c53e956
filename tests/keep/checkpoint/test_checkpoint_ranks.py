"""Every rank writes its part by itself; a step counts when all parts are there, and all ranks load the same one."""

import shutil

import pytest
import torch

from surefoot import CheckpointError, CheckpointManager, SettingError
from surefoot.keep.checkpoint.manifest import TENSORS

NAN = float("nan")


def saved(manager, step, value=1.0):
    assert manager.save({"weight": torch.full((4,), float(value)), "value": value}, step, blocking=True)


def steps(manager):
    return [each.step for each in manager.checkpoints()]


def ranks(folder, count, **settings):
    return [CheckpointManager(folder, rank=rank, world_size=count, every_steps=10, **settings) for rank in range(count)]


def test_a_step_is_whole_when_every_rank_has_its_part(tmp_path, caplog):
    managers = ranks(tmp_path, 3)
    for manager in managers:
        saved(manager, 10, value=manager.rank)
    for manager in managers[:2]:
        saved(manager, 20)
    for manager in managers:
        loaded = manager.load()
        assert (loaded.step, loaded.tree["value"]) == (10, manager.rank)
        assert steps(manager) == [10]
    assert caplog.text.count("step-00000020.rank-2: the part of rank 2 is missing") == 3
    with pytest.raises(CheckpointError, match=r"rank-2: the part of rank 2 is missing"):
        managers[0].load(20)
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000010.rank-1")
    with pytest.raises(CheckpointError, match=r"no checkpoint .* can be loaded"):
        managers[0].load()


def test_damage_in_one_part_sends_every_rank_to_the_same_older_step(tmp_path):
    managers = ranks(tmp_path, 2)
    for step in (10, 20):
        for manager in managers:
            saved(manager, step)
    file = tmp_path / "checkpoints" / "step-00000020.rank-1" / TENSORS
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert [manager.load().step for manager in managers] == [10, 10]


def test_ranks_delete_their_own_parts_and_a_step_is_good_only_if_all_parts_are(tmp_path):
    managers = ranks(tmp_path, 2, keep_last=2, keep_evidence=0)
    for step in (10, 20, 30, 40):
        for manager in managers:
            saved(manager, step, value=NAN if (step, manager.rank) == (30, 1) else 1.0)
    assert steps(managers[0]) == steps(managers[1]) == [40, 20]
    saved(managers[0], 50)  # the process of rank 1 was killed before its part
    for step in (60, 70):
        for manager in managers:
            saved(manager, step)
    assert steps(managers[0]) == steps(managers[1]) == [70, 60]
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    # Rank 0 sees that 70 is whole, and 40 not needed, when it saves next.
    assert names == {f"step-000000{step}{rank}" for step in (60, 70) for rank in ("", ".rank-1")} | {"step-00000040"}
    saved(managers[0], 80)
    assert not (tmp_path / "checkpoints" / "step-00000040").exists()


def test_another_number_of_processes_is_an_error_that_says_so(tmp_path):
    for manager in ranks(tmp_path, 2):
        saved(manager, 10)
    alone = CheckpointManager(tmp_path)
    with pytest.raises(CheckpointError, match=r"saved by 2 ranks and this run has 1"):
        alone.load()
    assert alone.load(tmp_path / "checkpoints" / "step-00000010.rank-1").facts["rank"] == 1
    saved(alone, 10)  # a smaller run comes by the same step
    assert alone.load().facts["world_size"] == 1
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000010"]


def test_ranks_stay_in_step_whatever_happens_to_one_of_them(tmp_path):
    one, other = ranks(tmp_path, 2)
    assert one.due(10)
    assert other.due(10)
    saved(one, 10, value=NAN)
    saved(other, 10)
    assert not one.due(10)
    assert [step for step in range(11, 31) if one.due(step)] == [step for step in range(11, 31) if other.due(step)]
    assert one.due(30)
    with pytest.raises(SettingError, match="every_minutes"):
        CheckpointManager(tmp_path, every_minutes=5, rank=0, world_size=2)


def test_rank_0_saving_alone_is_told_that_nothing_is_whole(tmp_path, caplog):
    manager = ranks(tmp_path, 2)[0]
    for step in (10, 20, 30, 40):
        saved(manager, step)
    assert caplog.text.count("use `CheckpointManager(..., rank=0, world_size=1)`") == 1
