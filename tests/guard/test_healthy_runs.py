"""Nothing is wrong with these runs, so nothing may be refused and nothing may be said above a remark."""

import pytest
import torch
from healthy_fields import FIELDS
from healthy_losses import LOSSES
from healthy_phases import PHASES
from healthy_rl import REINFORCEMENT
from healthy_runs import HEALTHY
from healthy_unseen import UNSEEN
from training_loops import same_bits, train_bare, train_guarded

pytestmark = pytest.mark.slow

STEPS = 150
"""The longest window of a step rule (128) is full before the end."""
JUMPS = {run.__name__ for run in (*PHASES, *LOSSES, *REINFORCEMENT[3:], *UNSEEN, *FIELDS)}
"""Kinds whose loss jumps for a good reason or has an unusual shape: `Spike` may refuse the first steps of a level."""


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


UNSETTLED = {"augmentation_switched_on"}
"""Whether such a run returns once, and stays there, depends on its last bits: a known false return."""


@pytest.mark.parametrize("name", sorted(JUMPS - UNSETTLED))
def test_a_run_whose_level_jumps_is_neither_halted_nor_sent_back_for_good(name):
    result = train_guarded(HEALTHY[name], seed=11, steps=STEPS)
    assert not result.halted, result.incidents
    assert result.returns == result.taken_back, result.incidents


@pytest.mark.parametrize("name", sorted(set(HEALTHY) - JUMPS))
def test_a_healthy_run_is_left_alone(name):
    result = train_guarded(HEALTHY[name], seed=11, steps=STEPS)
    assert result.skipped == 0, result.incidents
    assert not result.alarms, result.incidents
    assert len(result.losses) == STEPS


@pytest.mark.parametrize("name", ["fp16_with_scaler", "accumulate_four", "dqn_sparse_reward", "gan", "warm_restarts"])
def test_a_healthy_run_ends_on_the_bits_of_the_bare_loop(name):
    guarded, bare = train_guarded(HEALTHY[name], 12, 100), train_bare(HEALTHY[name], 12, 100)
    assert same_bits(guarded, bare)
    assert guarded.losses == pytest.approx(bare.losses)


def test_a_run_ends_when_its_time_is_up():
    assert train_guarded(HEALTHY["fast_fall"], 0, 5, until=0.0).losses == []
    assert len(train_guarded(HEALTHY["fast_fall"], 0, 5).losses) == 5
