"""`surefoot checkpoints`: what it prints, and its exit codes; the files themselves are in tests/keep."""

from __future__ import annotations

import shutil

import pytest
import torch

import surefoot as sf
from surefoot.keep.checkpoint.manifest import STATE


@pytest.fixture
def folder(tmp_path):
    with sf.CheckpointManager(tmp_path / "run", every_steps=None) as manager:
        manager.save({"weight": torch.zeros(3)}, 10, metric=-1.71106e-05, blocking=True)
        manager.save({"weight": torch.full((3,), torch.nan)}, 20, blocking=True)
    return tmp_path / "run"


def test_every_checkpoint_is_listed_with_what_it_is_good_for(command, folder):
    answer = command("checkpoints", "list", folder)
    newest, older = answer.out.splitlines()
    assert newest.split()[:3] == ["step", "20", "evidence"]
    assert older.split()[:3] == ["step", "10", "good"]
    assert "metric -1.7111e-05 (best)" in older
    assert max(map(len, (newest, older))) <= 80


def test_verifying_says_which_one_is_damaged_and_ends_with_1(command, folder):
    assert command("checkpoints", "verify", folder).code == 0
    with (folder / "checkpoints" / "step-00000010" / STATE).open("r+b") as file:
        file.write(b"[")
    answer = command("checkpoints", "verify", folder)
    assert answer.code == 1
    assert [line.split(":")[1].split(",")[0].strip() for line in answer.out.splitlines()] == ["complete", "damaged"]


def test_what_one_rank_has_not_deleted_yet_after_a_healthy_run_is_no_damage(command, tmp_path):
    managers = [sf.CheckpointManager(tmp_path, rank=rank, world_size=2, every_steps=None) for rank in range(2)]
    for step in (5, 10, 15, 20):
        for manager in managers:  # rank 0 is first, and does not find the newest step complete
            manager.save({"weight": torch.zeros(3)}, step, metric=1 / step, blocking=True)
    assert (tmp_path / "checkpoints" / "step-00000005").exists()
    assert not (tmp_path / "checkpoints" / "step-00000005.rank-1").exists()
    answer = command("checkpoints", "verify", tmp_path)
    assert answer.code == 0, answer.out
    assert "step 5: the rest of a deleted checkpoint" in answer.out
    assert max(map(len, command("checkpoints", "list", tmp_path).out.splitlines())) <= 90
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000015.rank-1")
    answer = command("checkpoints", "verify", tmp_path)
    assert answer.code == 1
    assert "step 15: damaged: step-00000015.rank-1: the part of rank 1 is missing" in answer.out


def test_a_checkpoint_is_exported_and_imported(command, folder, tmp_path):
    answer = command("checkpoints", "export", folder, tmp_path / "one.safetensors", "--step", "10")
    assert answer.code == 0
    assert "the state of step 10" in answer.out
    assert command("checkpoints", "import", tmp_path / "one.safetensors", tmp_path / "again").code == 0
    assert sf.CheckpointManager(tmp_path / "again").load().step == 10


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "`surefoot checkpoints` needs one of list, verify, export, import"),
        (["list", "missing"], "missing cannot be read"),
        (["export", "{run}", "out", "--step", "first"], "--step must be 'latest', 'good', 'best'"),
        (["export", "{run}", "out", "--step", "11"], "there is no checkpoint of step 11"),
        (["export", "{run}", "out", "--step", "10", "--weights"], "not saved by a TrainingStabilizer"),
        (["import", "missing", "x"], "missing is not a file"),
    ],
)
def test_wrong_use_is_one_line_with_the_way_out(command, folder, arguments, words):
    answer = command("checkpoints", *(each.replace("{run}", str(folder)) for each in arguments))
    assert (answer.code, answer.out) == (2, "")
    (line,) = answer.error.splitlines()
    assert words in line
