"""Replicas that differ are an alarm while the run goes on: real processes over gloo."""

import pytest
import torch.distributed as dist

import replica_scenarios as scenarios
import surefoot as sf
from rank_processes import Ranks, results

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")


@pytest.mark.parametrize(
    ("count", "odd", "kind", "named"),
    [(3, 0, "parameters", [0]), (3, 2, "moments", [2]), (2, 1, "parameters", [1])],
    ids=["the majority speaks against rank 0", "in the optimizer's state", "of two ranks, the higher one"],
)
def test_the_odd_rank_the_step_and_then_the_tensor_are_alarms_on_every_rank(tmp_path, count, odd, kind, named):
    assert Ranks().play(scenarios.spoil_one, tmp_path, count, odd=odd, at=6, kind=kind) == [0] * count
    for alarms in results(tmp_path, count):
        first, closer = alarms
        assert first["severity"] == closer["severity"] == "error"
        assert first["ranks"] == closer["ranks"] == named
        assert (first["last_equal_step"], first["first_step"]) == (5, 7)
        assert first["first_tensor"] is None
        assert closer["first_tensor"] == "2.weight"
    log = sf.load_run(tmp_path / "run" / "rank0")
    events = [event for event in log.events if event.cause == "dist.replicas-diverged"]
    assert [event.event for event in events] == ["alarm", "alarm"]
    assert f"rank {odd}" in events[0].summary


@pytest.mark.parametrize("kind", ["ddp", "sharded"])
def test_equal_replicas_raise_no_alarm_and_the_check_adds_no_collective(tmp_path, kind):
    assert Ranks().play(scenarios.healthy, tmp_path, kind=kind) == [0, 0]
    for outcome in results(tmp_path):
        bare, guarded = outcome["bare"], outcome["guarded"]
        assert guarded["parameters"] == bare["parameters"]
        assert "dist.replicas-diverged" not in guarded["alarms"]
        if kind == "ddp":
            assert guarded["collectives"] - bare["collectives"] == 20  # one per step, as without the check
