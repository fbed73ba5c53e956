"""Two real processes over gloo: DDP and FSDP2. The scenarios are played once, in `distributed_scenarios.py`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch.distributed as dist

import forked
from distributed_scenarios import SCENARIOS

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    script = Path(__file__).parents[1] / "distributed_scenarios.py"
    ranks = [forked.start([script, rank, folder]) for rank in range(2)]
    errors = [rank.end().stderr for rank in ranks]
    results = []
    for rank in range(2):
        file = folder / f"rank{rank}.json"
        results.append(json.loads(file.read_text()) if file.exists() else {})
    return results, errors


@pytest.mark.parametrize("name", SCENARIOS)
def test_two_ranks(played, name):
    results, errors = played
    for rank, result in enumerate(results):
        assert result.get(name) == "ok", f"rank {rank}: {result.get(name)}\n{errors[rank]}"
