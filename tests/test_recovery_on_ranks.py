"""Two real processes over gloo: they save together, come back together, stop together."""

from __future__ import annotations

import signal
import time

import pytest
import torch.distributed as dist

import rank_scenarios as scenarios
from rank_scenarios import Ranks, end_of, results

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")


@pytest.fixture(scope="module")
def ranks():
    return Ranks()


@pytest.fixture(scope="module")
def uninterrupted(ranks, tmp_path_factory):
    found = {}
    for kind in ("ddp", "fsdp"):
        folder = tmp_path_factory.mktemp(kind)
        assert ranks.play(scenarios.train, folder, kind=kind) == [0, 0]
        found[kind] = results(folder)
    return found


def assert_continues(ranks, folder, expected, first, kind="ddp"):
    """The run in `folder` goes on from the step `first` on every rank, and ends as if nothing had happened."""
    assert ranks.play(scenarios.train, folder, kind=kind) == [0, 0]
    for now, reference in zip(results(folder), expected, strict=True):
        assert now["first"] == first
        assert now["seen"] == reference["seen"][first:]
        for part in ("steps", "parameters", "buffers", "optimizer", "streams"):
            assert now[part] == reference[part], part


def test_ranks_of_ddp_hold_the_same_weights_and_different_streams(uninterrupted):
    one, other = uninterrupted["ddp"]
    assert one["parameters"] == other["parameters"]
    assert one["streams"] != other["streams"]
    assert one["seen"] != other["seen"]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_run_that_dies_on_all_ranks_ends_bitwise_like_one_that_did_not(ranks, uninterrupted, tmp_path, kind):
    assert ranks.play(scenarios.train, tmp_path, kind=kind, at=13, what="exit") == [9, 9]
    assert_continues(ranks, tmp_path, uninterrupted[kind], 10, kind)


def test_a_run_that_loses_one_rank_while_the_other_waits_for_it_comes_back(ranks, uninterrupted, tmp_path):
    processes = ranks.start(scenarios.train, tmp_path, at=13, what="kill", who=1)
    processes[1].join(60)
    time.sleep(0.3)
    processes[0].kill()
    assert end_of(processes)[1] == -signal.SIGKILL
    assert_continues(ranks, tmp_path, uninterrupted["ddp"], 10)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_signal_to_one_rank_ends_all_after_the_same_step(ranks, uninterrupted, tmp_path, kind):
    assert ranks.play(scenarios.train, tmp_path, kind=kind, at=7, what="terminate", who=1) == [143, 143]
    assert_continues(ranks, tmp_path, uninterrupted[kind], 8, kind)
