"""Two real processes over gloo: they save together, come back together, stop together."""

from __future__ import annotations

import os
import shutil
import signal
import time

import pytest
import torch.distributed as dist
from safetensors import safe_open

import rank_scenarios as scenarios
from patience import wait_until
from rank_processes import Ranks, end_of, results
from surefoot.keep.checkpoint.listing import complete_steps, list_checkpoints
from surefoot.keep.checkpoint.manifest import TENSORS

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")


@pytest.fixture(scope="module")
def ranks():
    return Ranks()


@pytest.fixture(scope="module")
def uninterrupted(ranks, tmp_path_factory):
    found = {}
    for kind in ("ddp", "fsdp"):
        folder = tmp_path_factory.mktemp(kind)
        assert ranks.play(scenarios.train, folder, kind=kind) == [0, 0]
        found[kind] = [{**result, "folder": folder} for result in results(folder)]
    return found


def whole_steps(folder):
    """The steps on disk that are whole, oldest first; all ranks must have the same to say about them."""
    steps = complete_steps(list_checkpoints(folder / "checkpoints"))
    for each in steps:
        assert len({manifest.facts["quiet"] for manifest in each.manifests.values()}) == 1
    return sorted(each.step for each in steps)


def assert_continues(ranks, folder, expected, first, kind="ddp"):
    """The run in `folder` goes on from the step `first` on every rank, and ends as if nothing had happened."""
    assert ranks.play(scenarios.train, folder, kind=kind) == [0, 0]
    for now, reference in zip(results(folder), expected, strict=True):
        assert now["first"] == first
        assert now["seen"] == reference["seen"][first:]
        for part in ("steps", "parameters", "buffers", "optimizer", "streams"):
            assert now[part] == reference[part], part


def test_ranks_of_ddp_hold_the_same_weights_and_different_streams(uninterrupted):
    one, other = uninterrupted["ddp"]
    assert one["parameters"] == other["parameters"]
    assert one["streams"] != other["streams"]
    assert one["seen"] != other["seen"]


def test_what_ddp_holds_alike_is_saved_once_and_shards_by_every_rank(uninterrupted):
    names = {}
    for kind in ("ddp", "fsdp"):
        parts = complete_steps(list_checkpoints(uninterrupted[kind][0]["folder"] / "checkpoints"))[0].paths
        for rank, path in parts.items():
            with safe_open(path / TENSORS, framework="pt") as file:
                names[kind, rank] = {name for name in file.keys() if name.startswith(("models", "optimizer"))}  # noqa: SIM118
    assert names["fsdp", 0] == names["fsdp", 1]
    assert names["ddp", 1] < names["ddp", 0]
    assert {name.split(".")[-1] for name in names["ddp", 1]} == {"running_mean", "running_var", "num_batches_tracked"}


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_run_that_dies_on_all_ranks_ends_bitwise_like_one_that_did_not(ranks, uninterrupted, tmp_path, kind):
    assert ranks.play(scenarios.train, tmp_path, kind=kind, at=13, what="exit") == [9, 9]
    assert_continues(ranks, tmp_path, uninterrupted[kind], 10, kind)


def test_a_run_that_loses_one_rank_while_the_other_waits_for_it_comes_back(ranks, uninterrupted, tmp_path):
    processes = ranks.start(scenarios.train, tmp_path, at=13, what="kill", who=1)
    wait_until(lambda: processes[1].poll() is not None)
    processes[0].send_signal(signal.SIGKILL)
    assert end_of(processes)[1] == -signal.SIGKILL
    assert_continues(ranks, tmp_path, uninterrupted["ddp"], 10)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_signal_to_one_rank_ends_all_after_the_same_step(ranks, uninterrupted, tmp_path, kind):
    assert ranks.play(scenarios.train, tmp_path, kind=kind, at=7, what="terminate", who=1) == [143, 143]
    assert_continues(ranks, tmp_path, uninterrupted[kind], 8, kind)


def test_a_warning_of_the_scheduler_to_one_rank_saves_on_all(ranks, uninterrupted, tmp_path):
    assert ranks.play(scenarios.train, tmp_path, at=7, what="usr1", who=1) == [143, 128 + signal.SIGUSR1]
    assert_continues(ranks, tmp_path, uninterrupted["ddp"], 8)


FAULTS = {
    "weight": "roll_back",
    "nan-weight": "roll_back",
    "batch": None,
    "spike": None,
    "burst": None,  # skipped, and the weights are where they should be
    "other-data": None,
}


@pytest.mark.parametrize("lag", [False, True], ids=["at once", "some steps later"])
@pytest.mark.parametrize("what", FAULTS)
def test_trouble_on_one_rank_brings_all_back_to_the_same_state(ranks, tmp_path, what, lag):
    assert ranks.play(scenarios.meet, tmp_path, what=what, lag=lag) == [0, 0]
    one, other = results(tmp_path)
    assert one["actions"] == other["actions"]
    assert [action for _, action, _ in one["actions"]][-1:] == ([FAULTS[what]] if FAULTS[what] else [])
    assert one["skipped"] == other["skipped"]
    assert one["rate"] == other["rate"]
    assert len(one["states"]) == 20
    assert one["states"] == other["states"]


@pytest.mark.parametrize("lag", [False, True], ids=["at once", "some steps later"])
def test_trouble_on_one_rank_has_all_ranks_repeat_the_same_steps(ranks, tmp_path, lag):
    found = {}
    for what in ("nothing", "nan-weight", "bad batch"):
        folder = tmp_path / what.replace(" ", "-")
        folder.mkdir()
        assert ranks.play(scenarios.go_over_again, folder, what=what, lag=lag) == [0, 0]
        one, other = results(folder)
        assert one == other
        found[what] = one
    assert found["nothing"]["actions"] == []
    assert [action for _, action, _ in found["nan-weight"]["actions"]] == ["repeat"]
    assert found["nan-weight"]["state"] == found["nothing"]["state"]
    assert [action for _, action, _ in found["bad batch"]["actions"]] == ["repeat", "repeat"]
    assert "without the batches of step 70" in found["bad batch"]["actions"][1][2]
    assert found["bad batch"]["steps"] == 110 < found["bad batch"]["taken"]


def test_a_sharded_model_returns_to_shards_in_memory(ranks, tmp_path):
    assert ranks.play(scenarios.meet, tmp_path, what="nan-weight", kind="fsdp") == [0, 0]
    one, other = results(tmp_path)
    assert [action for _, action, _ in one["actions"]] == ["roll_back"]
    assert one["actions"] == other["actions"]
    assert one["skipped"] == other["skipped"] == [scenarios.FAULT_AT]


def test_moments_of_shards_come_back_after_they_were_cleared(ranks, tmp_path):
    assert ranks.play(scenarios.meet, tmp_path, what="long burst", kind="fsdp", first="reset_moments") == [0, 0]
    one, other = results(tmp_path)
    assert [action for _, action, _ in one["actions"]][:2] == ["reset_moments", "roll_back"]
    assert one["actions"] == other["actions"]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_without_snapshots_all_ranks_return_to_the_same_checkpoint(ranks, tmp_path, kind):
    assert ranks.play(scenarios.meet, tmp_path, what="nan-weight", kind=kind, disk=True) == [0, 0]
    one, other = results(tmp_path)
    assert "back to the checkpoint of step 40" in one["actions"][0][2]
    assert one["actions"] == other["actions"]
    if kind == "ddp":
        assert one["states"] == other["states"]
    assert whole_steps(tmp_path / "run")[-1] == 80


def test_a_halt_comes_on_all_ranks_at_the_same_step_and_keeps_the_evidence(ranks, tmp_path):
    assert ranks.play(scenarios.meet, tmp_path, what="endless") == [0, 0]
    one, other = results(tmp_path)
    assert one["halted"][0] == other["halted"][0]
    assert one["states"] == other["states"]
    assert whole_steps(tmp_path / "run")[-1] == one["halted"][0]


def test_signals_to_all_ranks_at_slightly_different_moments_end_the_same_step(ranks, uninterrupted, tmp_path):
    processes = ranks.start(scenarios.train, tmp_path, slow=0.05)
    wait_until(lambda: (tmp_path / "at-0").exists() or processes[0].poll() is not None)
    for process in processes:
        time.sleep(0.03)
        os.kill(process.pid, signal.SIGTERM)
    (tmp_path / "sent").touch()
    assert end_of(processes) == [143, 143]
    assert_continues(ranks, tmp_path, uninterrupted["ddp"], whole_steps(tmp_path)[-1])


@pytest.fixture(scope="module")
def views(ranks, tmp_path_factory):
    """The checkpoints of one run, and ways in which a rank may see them."""
    folder = tmp_path_factory.mktemp("views")
    assert ranks.play(scenarios.train, folder / "all", at=13, what="exit") == [9, 9]
    for name in ("late", "none", "torn"):
        shutil.copytree(folder / "all", folder / name)
    shutil.rmtree(folder / "late" / "checkpoints" / "step-00000010.rank-1")
    shutil.rmtree(folder / "none" / "checkpoints")
    shutil.rmtree(folder / "torn" / "checkpoints" / "step-00000005")
    shutil.rmtree(folder / "torn" / "checkpoints" / "step-00000010.rank-1")
    return folder


@pytest.mark.parametrize(
    ("given", "step"),
    [(["all", "all"], 10), (["late", "late"], 5), (["all", "late"], 5), (["late", "all"], 5), (["none", "none"], 0)],
)
def test_all_ranks_come_back_to_the_step_that_all_can_read(ranks, views, given, step):
    assert ranks.play(scenarios.come_back, views, given=given) == [0, 0]
    one, other = results(views)
    assert one == other
    assert one[0] == step


@pytest.mark.parametrize(
    ("given", "loads", "said"),
    [
        (["all", None], "resume", "UsageError: every rank needs the same `checkpoints`"),
        (["none", "all"], "resume", "CheckpointError: the ranks do not find the same"),
        (["all", "none"], "resume", "CheckpointError: "),
        (["torn", "all"], "resume", "CheckpointError: "),
        (["all", "torn"], "resume", "CheckpointError: "),
        (["all", "late"], "10", "CheckpointError: step 10 cannot be loaded on every rank"),
        (["late", "all"], "10", "CheckpointError: "),
    ],
)
def test_ranks_that_cannot_come_back_together_all_say_so(ranks, views, given, loads, said):
    assert ranks.play(scenarios.come_back, views, given=given, loads=loads) == [0, 0]
    for result in results(views):
        assert isinstance(result, str), given
        assert result.startswith(said)


def test_another_number_of_processes_comes_back_to_the_same_step_and_weights(ranks, views):
    assert ranks.play(scenarios.come_back, views, given=["all"] * 2) == [0, 0]
    expected = results(views)[0]
    assert ranks.play(scenarios.come_back, views, count=3, given=["all"] * 3) == [0, 0, 0]
    assert results(views, 3) == [expected] * 3


def test_a_disk_that_fails_one_rank_costs_no_step_and_the_older_checkpoint_is_loaded(ranks, tmp_path):
    assert ranks.play(scenarios.fail_to_write, tmp_path) == [0, 0]
    assert results(tmp_path) == [[20, 10], [20, 10]]
    assert (tmp_path / "log-1").read_text().count("could not be written") == 1


@pytest.mark.parametrize("lag", [False, True], ids=["at once", "some steps later"])
def test_a_hard_batch_on_one_rank_or_another_is_no_setback_of_the_model(ranks, tmp_path, lag):
    assert ranks.play(scenarios.hard_batches, tmp_path, lag=lag) == [0, 0]
    assert results(tmp_path) == [[], []]


def test_a_setback_in_a_signal_of_ones_own_is_one_for_all_ranks(ranks, tmp_path):
    assert ranks.play(scenarios.hard_batches, tmp_path, lag=False, signal_name="level") == [0, 0]
    one, other = results(tmp_path)
    assert one == other
    assert one[0] == [89, "roll_back"]
