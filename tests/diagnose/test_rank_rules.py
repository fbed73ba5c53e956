"""Causes that a comparison of ranks shows, each beside what is healthy; the files of the ranks are made by hand."""

from __future__ import annotations

import pytest

from ranked import NAMES, STEPS, MadeRank, RankLoader, apart, claims, pair, prints
from surefoot.diagnose.rank_comparison import Votes
from surefoot.record.facts import GroupSettings

# ---- votes ----------------------------------------------------------------------------------------------------------


def test_the_odd_rank_is_the_one_that_differs_from_most():
    votes = Votes()
    for rank in range(5):
        votes.add("a" if rank != 3 else "b", rank)
    assert votes.differ
    assert (votes.odd, votes.reference, votes.usual) == ([3], 0, "a")


def test_the_majority_decides_even_against_rank_0():
    votes = Votes()
    for rank in range(5):
        votes.add("a" if rank else "b", rank)
    assert (votes.odd, votes.reference) == ([0], 1)


def test_of_two_ranks_the_lower_one_is_the_reference():
    votes = Votes()
    votes.add("b", 0)
    votes.add("a", 1)
    assert (votes.odd, votes.reference) == ([1], 0)


# ---- healthy --------------------------------------------------------------------------------------------------------


def test_replicas_that_are_equal_and_see_different_data_are_healthy(tmp_path):
    assert claims(tmp_path, *pair()) == {}


def test_separate_models_are_healthy(tmp_path):
    looks = {-1: {"parameters": prints(9, 9, 9), "gradients": prints(8, 8, 8)}}
    ranks = MadeRank(0, parallel="none"), MadeRank(1, parallel="none", looks=looks)
    assert claims(tmp_path, *ranks) == {}


def test_separate_models_with_other_settings_and_the_same_data_are_healthy(tmp_path):
    looks = {step: {"parameters": prints(9, 9, 9), "gradients": prints(8, 8, 8), "lr": [0.3], "inputs": step}
             for step in (0, 1, 2, 3, 5, 8, 12)}  # fmt: skip
    ranks = MadeRank(0, parallel="none"), MadeRank(1, parallel="none", looks=looks, optimizer={"type": "SGD"})
    assert claims(tmp_path, *ranks) == {}


@pytest.mark.parametrize(
    "of_sweep",
    [
        {"lr": [0.3]},  # another rate: the gradients differ from the second step on
        {"gradients": prints(3, 3, 3)},  # another dropout, on the same data
    ],
)
def test_a_sweep_that_begins_with_one_seed_is_healthy(tmp_path, of_sweep):
    looks = apart(1, 1, ("parameters", "gradients")) | {0: {"after": prints(4, 4, 4).total}}
    looks = {step: each | of_sweep | {"inputs": step, "targets": step} for step, each in looks.items()}
    assert claims(tmp_path, MadeRank(0, parallel="none"), MadeRank(1, parallel="none", looks=looks)) == {}


def test_ranks_that_are_not_connected_are_left_alone(tmp_path):
    looks = apart(1, 1, ("parameters", "gradients")) | {0: {"gradients": prints(1, 2, 3)}}
    alone = {"setup": {"initialized": False}, "parallel": "none"}
    assert claims(tmp_path, MadeRank(0, **alone), MadeRank(1, looks=looks, **alone)) == {}


def test_parameters_that_are_averaged_now_and_then_are_healthy(tmp_path):
    """Local SGD: as many numbers are exchanged as the model has, and the gradients are each rank's own."""
    looks = {step: {"gradients": prints(5, 5, 5), "communicated": 3000} for step in (0, 1, 2, 3, 5, 8, 12)}
    looks[3] |= {"parameters": prints(9, 9, 9)}
    looks[12] |= {"parameters": prints(9, 9, 9)}
    ranks = MadeRank(0, parallel="none"), MadeRank(1, parallel="none", looks=looks)
    assert claims(tmp_path, *ranks) == {}


def test_gradients_may_differ_where_the_parameters_never_do(tmp_path):
    looks = {-1: {"gradients": prints(5, 5, 5)}}
    assert claims(tmp_path, *pair(looks=looks)) == {}


def test_a_communication_hook_of_the_scripts_own_is_left_alone(tmp_path):
    looks = apart(1, 1, ("parameters", "gradients"))
    made = {"has_own_hook": True}
    assert claims(tmp_path, MadeRank(0, optimizer=made), MadeRank(1, optimizer=made, looks=looks)) == {}


def test_ranks_of_different_groups_are_not_compared(tmp_path):
    looks = apart(0, 1, ("parameters", "gradients"))
    ranks = MadeRank(0, optimizer={"members": [0]}), MadeRank(1, optimizer={"members": [1]}, looks=looks)
    assert claims(tmp_path, *ranks) == {}


def test_models_of_different_shapes_are_not_compared(tmp_path):
    looks = apart(0, 1, ("parameters", "gradients"))
    assert claims(tmp_path, *pair(optimizer={"layout": "bb"}, looks=looks)) == {}


def test_a_rank_that_runs_out_of_data_early_is_healthy(tmp_path):
    assert claims(tmp_path, *pair(steps=(0, 1, 2, 3))) == {}


def test_moments_that_each_rank_keeps_a_share_of_are_healthy(tmp_path):
    """As with ZeRO: the parameters stay equal."""
    assert claims(tmp_path, *pair(looks={-1: {"moments": prints(0, 0, 5)}})) == {}


def test_ranks_that_take_different_numbers_of_steps_inside_of_join_are_healthy(tmp_path):
    looks = apart(1, 1, ("parameters", "gradients"))
    uneven = {step: {"uneven": True} | looks.get(step, {}) for step in STEPS}
    assert claims(tmp_path, MadeRank(0, looks={-1: {"uneven": True}}), MadeRank(1, looks=uneven)) == {}


# ---- replicas -------------------------------------------------------------------------------------------------------


def test_a_replica_that_differs_is_named_with_its_rank_step_and_tensor(tmp_path):
    ranks = [MadeRank(rank, 4, looks=apart(5, rank) if rank == 2 else {}) for rank in range(4)]
    (claim,) = claims(tmp_path, *ranks).values()
    assert (claim.evidence["rank"], claim.step, claim.evidence["first_tensor"]) == (2, 5, NAMES[2])
    assert claim.evidence["last_equal_step"] == 3
    assert claim.evidence["changed_without_a_step"] is False


def test_weights_that_were_never_made_equal_are_diverged_replicas(tmp_path):
    found = claims(tmp_path, MadeRank(0, parallel="none"), MadeRank(1, parallel="none", looks=apart(0, 1)))
    assert set(found) == {"dist.replicas-diverged"}
    assert found["dist.replicas-diverged"].step == 0
    assert "never made equal" in found["dist.replicas-diverged"].summary


def test_a_replica_that_changes_between_two_steps_is_the_odd_one_whatever_its_number(tmp_path):
    changed = {3: {"next": prints(77, 77, 77).total}} | apart(5, 0)
    (claim,) = claims(tmp_path, MadeRank(0, looks=changed), MadeRank(1)).values()
    assert (claim.evidence["rank"], claim.step) == (0, 4)
    assert claim.evidence["changed_without_a_step"]
    assert "without a step of the optimizer" in claim.summary


def test_an_optimizer_state_that_one_rank_alone_has_loaded_is_named(tmp_path):
    looks = apart(1, 1, ("parameters", "moments")) | {0: {"moments": prints(1, 2, 3)}}
    (claim,) = claims(tmp_path, *pair(looks=looks)).values()
    assert claim.step == 0
    assert "moments" in claim.summary


def test_a_rank_that_skips_a_step_alone_is_named_by_its_backwards(tmp_path):
    looks = apart(5, 1)
    for step, each in looks.items():
        each |= {"backwards": step + 2, "gradients": prints(1, 1, 1)}
    (claim,) = claims(tmp_path, *pair(looks=looks)).values()
    assert "do not take the same steps" in claim.summary
    assert claim.evidence["backwards"] == {"rank 0": 6, "rank 1": 7}


# ---- settings -------------------------------------------------------------------------------------------------------


def test_learning_rates_that_differ_explain_the_replicas(tmp_path):
    looks = {step: {"lr": [0.05]} | each for step, each in apart(5, 1).items()}
    found = claims(tmp_path, *pair(looks=looks))
    assert set(found) == {"dist.config-disagrees"}
    assert found["dist.config-disagrees"].step == 5
    assert found["dist.config-disagrees"].evidence["rank 1"] == "0.05"


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ({"optimizer": {"type": "SGD"}}, "the class of the optimizer"),
        (
            {"optimizer": {"settings": [GroupSettings(values={"lr": 0.1, "weight_decay": 0.5})]}},
            "the settings of the optimizer",
        ),
        ({"setup": {"torch": "2.11"}}, "the version of torch"),
        ({"setup": {"code": {"train.py": "other"}}}, "the code of train.py"),
        (
            {"setup": {"loaders": [RankLoader(sampler="DistributedSampler", rows=99, batch_size=4)]}},
            "the number of rows behind `DistributedSampler`",
        ),
        (
            {"setup": {"loaders": [RankLoader(sampler="RandomSampler", rows=50, batch_size=4)]}},
            "the sampler of the loader at step 0: RandomSampler and DistributedSampler",
        ),
    ],
)
def test_what_ranks_of_one_model_differ_in_is_named(tmp_path, made, words):
    first = {"code": {"train.py": "one"}, "loaders": [RankLoader(sampler="DistributedSampler", rows=50, batch_size=4)]}
    second = {**made, "setup": first | made.get("setup", {})}
    (claim,) = claims(tmp_path, MadeRank(0, setup=first), MadeRank(1, **second)).values()
    assert words in claim.summary
    assert claim.evidence["rank"] == 1


def test_a_module_that_only_one_rank_imports_is_healthy(tmp_path):
    first = {"code": {"train.py": "one", "logger.py": "two"}}
    assert claims(tmp_path, MadeRank(0, setup=first), MadeRank(1, setup={"code": {"train.py": "one"}})) == {}


def test_shards_of_different_length_without_a_distributed_sampler_are_healthy(tmp_path):
    ranks = [
        MadeRank(rank, setup={"loaders": [RankLoader(sampler="RandomSampler", rows=50 + rank, batch_size=4)]})
        for rank in range(2)
    ]
    assert claims(tmp_path, *ranks) == {}


def test_a_rank_that_evaluates_before_it_trains_has_other_loaders_and_is_healthy(tmp_path):
    train = RankLoader(sampler="DistributedSampler", rows=50, batch_size=4)
    validate = RankLoader(sampler="SequentialSampler", rows=50, batch_size=4)
    ranks = MadeRank(0, setup={"loaders": [validate, train]}), MadeRank(1, setup={"loaders": [train]})
    assert claims(tmp_path, *ranks) == {}


def test_loss_scales_that_differ_are_named_and_explain_the_rest(tmp_path):
    looks = {step: each | {"scale": 512.0} for step, each in apart(3, 1, ("parameters", "gradients")).items()}
    found = claims(
        tmp_path, MadeRank(0, looks={-1: {"scale": 1024.0}}), MadeRank(1, looks={-1: {"scale": 1024.0}} | looks)
    )
    assert set(found) == {"dist.scale-disagrees"}
    assert found["dist.scale-disagrees"].step == 3
    assert found["dist.scale-disagrees"].evidence["scales"] == {"rank 0": 1024.0, "rank 1": 512.0}
    assert found["dist.scale-disagrees"].fixes == ()


def test_loss_scales_that_differ_from_the_first_step_on_come_from_the_settings_of_the_scaler(tmp_path):
    found = claims(tmp_path, MadeRank(0, looks={-1: {"scale": 256.0}}), MadeRank(1, looks={-1: {"scale": 1024.0}}))
    assert "with the same settings on every rank" in found["dist.scale-disagrees"].fixes[0]


# ---- data -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["inputs", "targets"])
def test_the_same_batches_on_all_ranks_are_named(tmp_path, kind):
    looks = {step: {kind: step} for step in (0, 1, 2, 3, 5, 8, 12)}
    (claim,) = claims(tmp_path, *pair(looks=looks)).values()
    assert claim.evidence["steps_compared"] == 7
    assert claim.evidence["rank"] == 1


def test_one_batch_that_all_ranks_train_on_is_no_evidence(tmp_path):
    ranks = [MadeRank(rank, looks={-1: {"inputs": 5, "targets": 6}}) for rank in range(2)]
    assert claims(tmp_path, *ranks) == {}


def test_one_batch_in_common_is_an_accident(tmp_path):
    assert claims(tmp_path, *pair(looks={3: {"inputs": 3, "targets": 3}})) == {}
