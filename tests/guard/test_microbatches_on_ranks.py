"""Two real processes over gloo that cut their batches differently; played once, in `microbatch_scenarios.py`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch.distributed as dist

import forked
from microbatch_scenarios import SCENARIOS

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    script = Path(__file__).parents[1] / "microbatch_scenarios.py"
    ranks = [forked.start([script, rank, folder]) for rank in range(2)]
    errors = [rank.end().stderr for rank in ranks]
    files = [folder / f"rank{rank}.json" for rank in range(2)]
    return [json.loads(file.read_text()) if file.exists() else {} for file in files], errors


@pytest.mark.parametrize("name", SCENARIOS)
def test_two_ranks(played, name):
    results, errors = played
    for rank, result in enumerate(results):
        assert result.get(name) == "ok", f"rank {rank}: {result.get(name)}\n{errors[rank]}"
