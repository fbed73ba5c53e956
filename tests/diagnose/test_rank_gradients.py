"""Gradients that are not averaged, with the reason, beside what is healthy; the files of the ranks are made by hand."""

from __future__ import annotations

import pytest

from ranked import STEPS, MadeRank, apart, claims, pair, prints


def averaged_by_hand(gradients, communicated=40_000):
    """Two ranks without DDP that begin equal; `gradients` are those of the second one, by step."""
    looks = {step: {"gradients": gradients(step), "communicated": communicated} for step in STEPS}
    for step in STEPS[1:]:
        looks[step]["parameters"] = prints(step, 7000 + step, step)
    return MadeRank(0, parallel="none"), MadeRank(1, parallel="none", looks=looks)


def test_a_parameter_that_was_forgotten_when_gradients_are_averaged_by_hand_is_named(tmp_path):
    found = claims(tmp_path, *averaged_by_hand(lambda step: prints(100 + step, 5000 + step, 100 + step)))
    claim = found["dist.gradients-not-averaged"]
    assert (claim.severity, claim.step, claim.where[:2]) == ("error", 0, ("rank 1", "0.bias"))
    assert "averages the gradients of other parameters of the same layer" in claim.summary
    assert "`0.bias`" in claim.fixes[0]


def test_a_layer_that_each_rank_trains_for_itself_is_healthy(tmp_path):
    """`2.weight` is a layer of its own: the head of each rank, on a body that all share."""
    assert claims(tmp_path, *averaged_by_hand(lambda step: prints(100 + step, 100 + step, 5000 + step))) == {}


def test_local_steps_with_a_parameter_that_has_no_gradient_are_healthy(tmp_path):
    first, second = averaged_by_hand(lambda step: prints(0, 5000 + step, 6000 + step))
    first.looks = {-1: {"gradients": prints(0, 100, 100)}}
    assert claims(tmp_path, first, second) == {}


@pytest.mark.parametrize("counted", [True, False])
def test_steps_between_two_records_that_averaged_nothing_explain_different_parameters(tmp_path, counted):
    looks = apart(8, 1)
    for step in looks:
        looks[step]["unsynchronized_steps"] = 2 * counted
    found = claims(tmp_path, *pair(looks=looks))
    assert set(found) == {"dist.gradients-not-averaged" if counted else "dist.replicas-diverged"}
    (claim,) = found.values()
    assert (claim.step, claim.evidence["rank"], claim.evidence["last_equal_step"]) == (8, 1, 5)
    assert ("2 steps in between followed a forward under `no_sync()`" in claim.summary) == counted


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_alone_changes_averaged_gradients_is_the_odd_one(tmp_path, who):
    looks = apart(1, 1, ("parameters", "gradients")) | {0: {"gradients": prints(5, 5, 5), "after": "other"}}
    ranks = MadeRank(0), MadeRank(1, looks=looks)
    for each in ranks:
        for step in STEPS:
            each.looks[step] = each.looks.get(step, {}) | {"gradients_changed": each.rank == who}
    claim = claims(tmp_path, *ranks)["dist.gradients-not-averaged"]
    assert (claim.evidence["rank"], claim.evidence["compared_with_rank"]) == (who, 1 - who)
    assert f"then they were changed on rank {who} only, between the backward and the step" in claim.summary
    assert claim.fixes[0].startswith("Clip, scale or mask gradients on every rank in the same way")


def test_gradients_that_every_rank_changed_in_its_own_way_are_named(tmp_path):
    looks = apart(1, 1, ("parameters", "gradients"))
    ranks = MadeRank(0), MadeRank(1, looks=looks)
    for each in ranks:
        for step in STEPS:
            each.looks[step] = each.looks.get(step, {}) | {"gradients_changed": True}
    claim = claims(tmp_path, *ranks)["dist.gradients-not-averaged"]
    assert "every rank changed them, each in its own way" in claim.summary
    assert claim.fixes[0].startswith("Divide the loss instead of the gradients")


@pytest.mark.parametrize(
    ("parallel", "look", "words"),
    [
        ("ddp", {"wrapper_called": False, "synchronized": None}, "was called directly"),
        ("ddp", {"synchronized": False}, "`no_sync()`"),
        ("ddp", {}, "did not average"),
        ("none", {}, "not wrapped in DistributedDataParallel"),
    ],
)
def test_gradients_that_are_not_averaged_are_named_with_the_reason(tmp_path, parallel, look, words):
    looks = apart(1, 1) | {0: {}}
    looks = {step: each | look | {"gradients": prints(100 + step, 9, 9)} for step, each in looks.items()}
    looks[0]["after"] = prints(4, 4, 4).total
    looks[0]["next"] = looks[0]["after"]
    found = claims(tmp_path, MadeRank(0, parallel=parallel), MadeRank(1, parallel=parallel, looks=looks))
    (claim,) = found.values()
    assert set(found) == {"dist.gradients-not-averaged"}
    assert words in claim.summary
    assert claim.severity == ("error" if parallel == "ddp" else "warning")
    assert (claim.step, claim.evidence["rank"], claim.evidence["first_tensor"]) == (0, 1, "0.bias")
    assert claim.where[:2] == ("rank 1", "0.bias")
