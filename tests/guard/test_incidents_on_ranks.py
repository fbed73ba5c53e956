"""Two real processes over gloo: each keeps its own part of a refused step."""

import pytest
import torch.distributed as dist

import rank_scenarios as scenarios
import surefoot as sf
from captured import incidents_in
from rank_processes import Ranks, results
from surefoot.record.incidents.reading import read_incident

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")


def test_each_rank_keeps_its_own_and_says_that_gradients_are_averages(tmp_path):
    assert Ranks().play(scenarios.keep_incident, tmp_path) == [0, 0]
    for rank in (0, 1):
        (folder,) = incidents_in(tmp_path / "run" / f"rank{rank}")
        facts = read_incident(folder).facts
        assert (facts["step"], facts["rank"], facts["world_size"], facts["exact"]) == (2, rank, 2, False)
        assert "averaged over 2 processes" in facts["inexact"][0]
        assert isinstance(facts["fingerprints"]["loss"], str) == (rank == 1)  # a word, since it is no number


def test_a_collective_that_fails_is_an_event_of_the_log(tmp_path):
    assert Ranks().play(scenarios.fail_collective, tmp_path) == [0, 0]
    assert results(tmp_path, 1)[0]["raised"]
    log = sf.load_run(tmp_path / "run" / "rank0")
    (event,) = (event for event in log.events if event.cause == "dist.collective-failed")
    assert (event.event, event.severity, event.step) == ("alarm", "error", 2)
    assert "gloo" in event.summary or "Connection" in event.summary
