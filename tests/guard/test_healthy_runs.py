"""Nothing is wrong with these runs, so nothing may be refused and nothing may be said above a remark."""

import pytest
import torch
from healthy_runs import HEALTHY
from training_loops import same_bits, train_bare, train_guarded

pytestmark = pytest.mark.slow

STEPS = 200


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", HEALTHY)
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
