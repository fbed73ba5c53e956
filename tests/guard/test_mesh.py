"""DDP, FSDP2, HSDP and tensor parallelism over gloo: guarded like the bare loop, refused together, resumed anywhere."""

from __future__ import annotations

from functools import cache

import pytest
import torch.distributed as dist

import mesh_scenarios as scenarios
from rank_processes import Ranks, results
from surefoot.keep.checkpoint.exchange import export_state, import_state, load_whole

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")

COUNTS = {"ddp": 2, "fsdp": 2, "hsdp": 4, "tp": 2, "fsdp-tp": 4}


@pytest.fixture(scope="module")
def ranks():
    return Ranks()


@pytest.fixture(scope="module")
def played(ranks, tmp_path_factory):
    """What every rank says of a healthy run on a mesh, and of one with trouble."""

    @cache
    def play(kind):
        folder, count = tmp_path_factory.mktemp(kind), COUNTS[kind]
        assert ranks.play(scenarios.healthy_then_trouble, folder, count, kind=kind) == [0] * count
        return results(folder, count)

    return play


@pytest.mark.parametrize("kind", COUNTS)
def test_a_guarded_run_is_bitwise_the_bare_one(played, kind):
    for each in played(kind):
        bare, guarded = each["healthy"]
        assert guarded == bare


@pytest.mark.parametrize("kind", COUNTS)
def test_what_one_rank_refuses_changes_nothing_on_any(played, kind):
    every = [each["trouble"] for each in played(kind)]
    first = every[0]
    for each in every:
        assert each["skipped"] == list(scenarios.BAD), "a NaN and a spike"
        assert each["changed"] == [step for step in range(scenarios.STEPS_OF_TROUBLE) if step not in scenarios.BAD]
        assert each["norms"] == pytest.approx(first["norms"])
        assert each["whole"] == first["whole"]


CHAINS = {
    "fewer and more ranks": [("fsdp", 4), ("fsdp", 2), ("fsdp", 3), ("fsdp", 1)],
    "ddp": [("ddp", 3), ("ddp", 2), ("ddp", 1)],
    "hsdp": [("hsdp", 4), ("hsdp", 2)],
    "tp": [("tp", 2), ("tp", 5), ("tp", 1)],
    "other meshes": [("hsdp", 4), ("tp", 2), ("fsdp-tp", 4), ("hsdp", 2), ("fsdp", 4)],
    "with and without shards": [("plain", 1), ("fsdp", 3), ("ddp", 2), ("tp", 2), ("plain", 1), ("ddp", 3)],
}


@pytest.mark.parametrize("chain", CHAINS)
def test_a_run_continues_with_the_same_state_on_another_number_of_ranks_and_another_mesh(ranks, tmp_path, chain):
    before = []
    for kind, count in CHAINS[chain]:
        assert ranks.play(scenarios.walk, tmp_path, count, kind=kind) == [0] * count
        now = results(tmp_path, count)
        for rank, each in enumerate(now):
            assert each["left"] == now[0]["left"]
            if before:
                assert each["found"] == before[0]["left"], (kind, count)
                assert each["rules"][0] == before[rank % len(before)]["rules"][1], (kind, count)
        before = now


def test_the_parts_of_all_ranks_are_exported_as_one_file_and_resumed_from(ranks, tmp_path):
    assert ranks.play(scenarios.walk, tmp_path, 4, kind="fsdp-tp") == [0] * 4
    left = results(tmp_path, 1)[0]["left"]
    export_state(load_whole(tmp_path / "run" / "checkpoints", "latest"), tmp_path / "state.safetensors")
    import_state(tmp_path / "state.safetensors", tmp_path / "again" / "run")
    assert ranks.play(scenarios.walk, tmp_path / "again", 3, kind="fsdp") == [0] * 3
    assert [each["found"] for each in results(tmp_path / "again", 3)] == [left] * 3


def test_a_rank_that_was_there_continues_with_its_random_streams_and_a_new_one_with_its_own(ranks, tmp_path):
    assert ranks.play(scenarios.walk, tmp_path, 2, kind="fsdp") == [0, 0]
    before = [each["streams"] for each in results(tmp_path, 2)]
    assert ranks.play(scenarios.walk, tmp_path, 3, kind="fsdp") == [0, 0, 0]
    after = [each["streams"][0] for each in results(tmp_path, 3)]
    assert after[:2] == [left for _, left in before]
    assert after[2] not in after[:2]
