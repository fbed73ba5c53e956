"""A stabilizer whose other rank has left says which one, and when, instead of "Connection closed by peer"."""

import pytest
import torch.distributed as dist

import hang_scenarios as scenarios
import surefoot as sf
from rank_processes import Ranks, end_of
from surefoot.record.heartbeat import read_beat

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")


def test_the_rank_that_left_is_named_in_the_error_and_its_steps_are_counted(tmp_path):
    assert end_of(Ranks().start(scenarios.leave_early, tmp_path, leaver=1, after=5)) == [0, 0]
    said = (tmp_path / "result-0.json").read_text()
    assert "this rank cannot continue: rank 1 has ended after 5 steps (exit code 0)." in said
    assert "gloo" in said
    assert read_beat(tmp_path / "run" / "rank1").movement == "ended"
    events = sf.load_run(tmp_path / "run" / "rank0").events
    assert any(event.cause == "dist.collective-failed" for event in events)
