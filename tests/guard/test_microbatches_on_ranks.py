"""Two real processes over gloo that cut their batches differently; played once, in `microbatch_scenarios.py`."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from microbatch_scenarios import SCENARIOS
from rank_processes import play_all

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    return play_all("microbatch_scenarios", tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", SCENARIOS)
def test_two_ranks(played, name):
    assert [result.get(name) for result in played] == ["ok", "ok"]
