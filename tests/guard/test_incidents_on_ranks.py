"""Two real processes over gloo: each keeps its own part of a refused step."""

import pytest
import torch.distributed as dist

import rank_scenarios as scenarios
from captured import incidents_in
from rank_processes import Ranks
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
