"""Choosing a checkpoint and reading it; a damaged one is passed over."""

import pytest
import torch

from surefoot.errors import CheckpointError
from surefoot.keep.checkpoint.listing import part_name
from surefoot.keep.checkpoint.loading import Reader, load_first, load_path, load_step
from surefoot.keep.checkpoint.manifest import TENSORS
from surefoot.keep.checkpoint.storage import write


def save(folder, step, **facts):
    given = {"quiet": True, "metric": None, "metric_given": True, "rank": 0, "world_size": 1, "number": step}
    write(folder / part_name(step, 0), {"step": step, "w": torch.full((2,), float(step))}, given | facts, step=step)


def damage(folder, step):
    path = folder / part_name(step, 0) / TENSORS
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_latest_good_and_best_differ(tmp_path):
    save(tmp_path, 1, metric=0.5)
    save(tmp_path, 2, metric=0.7)
    save(tmp_path, 3, quiet=False)
    assert [load_first(tmp_path, which, Reader(0, 1)).step for which in ("latest", "good", "best")] == [3, 2, 1]


def test_a_damaged_one_is_passed_over_with_a_warning(tmp_path, caplog):
    save(tmp_path, 1)
    save(tmp_path, 2)
    damage(tmp_path, 2)
    assert load_first(tmp_path, "latest", Reader(0, 1)).tree["step"] == 1
    assert "It is skipped; step 1 is loaded instead" in caplog.text


def test_where_all_are_damaged_it_is_an_error_and_where_there_is_none_it_is_none(tmp_path):
    assert load_first(tmp_path / "missing", "latest", Reader(0, 1)) is None
    save(tmp_path, 1)
    damage(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be loaded: step-00000001"):
        load_first(tmp_path, "latest", Reader(0, 1))


def test_steps_that_another_rank_cannot_read_are_left_out(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 2)
    assert load_first(tmp_path, "latest", Reader(0, 1), without=[2]).step == 1


def test_a_step_means_that_one_and_no_other(tmp_path):
    save(tmp_path, 1)
    assert load_step(tmp_path, 1, Reader(0, 1)).step == load_path(tmp_path / part_name(1, 0)).step == 1
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 2 .* there are \[1\]"):
        load_step(tmp_path, 2, Reader(0, 1))
    with pytest.raises(CheckpointError, match=r"saved by 1 rank and this run has 2"):
        load_step(tmp_path, 1, Reader(0, 2))
