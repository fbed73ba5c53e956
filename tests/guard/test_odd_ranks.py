"""ZeRO-1, communication hooks, `join`, several process groups: guarded rightly, or refused with a reason."""

from __future__ import annotations

import pytest
import torch.distributed as dist

import odd_rank_scenarios as scenarios
from rank_processes import Ranks, results

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")


@pytest.fixture(scope="module")
def ranks():
    return Ranks()


@pytest.mark.parametrize("what", scenarios.MADE)
def test_a_guarded_run_is_bitwise_the_bare_one_and_refuses_together(ranks, tmp_path, what):
    assert ranks.play(scenarios.healthy, tmp_path, what=what) == [0, 0]
    for found in results(tmp_path):
        assert found["guarded"] == found["bare"]
        assert found["skipped"]
        assert found["after"] == found["guarded"]
        assert found["next"]


def test_what_cannot_be_guarded_is_refused_with_the_way_out(ranks, tmp_path):
    assert ranks.play(scenarios.refusals, tmp_path) == [0, 0]
    for said in results(tmp_path):
        assert "`checkpoints` and `recovery` cannot store it" in said["zero and checkpoints"]
        assert "`checkpoints` and `recovery` cannot store it" in said["zero and recovery"]
        assert "use_error_feedback=True, warm_start=True" in said["power"]
        assert said["plain power"] == ""
        assert "bf16_compress_hook" in said["power later"]


def test_models_whose_ranks_could_not_know_of_each_other_are_refused(ranks, tmp_path):
    assert ranks.play(scenarios.crossed_groups, tmp_path, 4) == [0] * 4
    for rank, (crossed, inside) in enumerate(results(tmp_path, 4)):
        assert "trained by different processes" in crossed
        assert str([rank // 2 * 2, rank // 2 * 2 + 1]) in crossed
        assert str([rank % 2, rank % 2 + 2]) in crossed
        assert inside == ""


@pytest.mark.parametrize("scenario", [scenarios.uneven, scenarios.uneven_and_attached])
def test_inside_of_join_the_first_step_says_that_it_cannot_be_guarded(ranks, tmp_path, scenario):
    assert ranks.play(scenario, tmp_path) == [0, 0]
    for said in results(tmp_path):
        assert "inside `join()`" in said


@pytest.mark.parametrize("attached", [False, True])
def test_steps_after_join_are_guarded(ranks, tmp_path, attached):
    assert ranks.play(scenarios.after_join, tmp_path, attached=attached) == [0, 0]
    (skipped, weights), other = results(tmp_path)
    assert skipped == [[1], [2]]
    assert other == [skipped, weights]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_ranks_agree_with_those_that_train_the_same_model_and_no_others(ranks, tmp_path, kind):
    assert ranks.play(scenarios.groups, tmp_path, 4, kind=kind) == [0] * 4
    assert results(tmp_path, 4) == [[3], [3], [], []]


def test_replicas_of_a_model_that_is_spread_over_a_mesh_agree_on_all_of_it(ranks, tmp_path):
    assert ranks.play(scenarios.replicas_of_a_spread_model, tmp_path, 4) == [0] * 4
    assert results(tmp_path, 4) == [[3]] * 4
