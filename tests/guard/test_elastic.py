"""Runs that lose a rank, or go on with another number of them, over gloo."""

from __future__ import annotations

import signal

import pytest
import torch.distributed as dist

import elastic_scenarios as scenarios
from patience import wait_until
from rank_processes import Ranks, end_of, results

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")

COUNTS = {"ddp": 2, "fsdp": 2, "hsdp": 4, "tp": 2, "fsdp-tp": 4}


@pytest.fixture(scope="module")
def ranks():
    return Ranks()


@pytest.mark.parametrize(("kind", "count"), COUNTS.items())
def test_a_run_that_lost_a_rank_ends_bitwise_like_one_that_did_not(ranks, tmp_path, kind, count):
    assert ranks.play(scenarios.killed, tmp_path / "whole", count, kind=kind) == [0] * count
    expected = results(tmp_path / "whole", count)
    processes = ranks.start(scenarios.killed, tmp_path / "torn", count, kind=kind, at=7)
    wait_until(lambda: processes[1].poll() is not None)
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
    assert end_of(processes)[1] == -signal.SIGKILL
    assert ranks.play(scenarios.killed, tmp_path / "torn", count, kind=kind) == [0] * count
    for now, before in zip(results(tmp_path / "torn", count), expected, strict=True):
        assert now["first"] == 4
        assert (now["state"], now["streams"]) == (before["state"], before["streams"])


def rows_of(found):
    """The rows of each step, over all ranks, in any order."""
    steps = {step for each in found for step in each["rows"]}
    return {int(step): sorted(row for each in found for row in each["rows"].get(step, [])) for step in steps}


@pytest.fixture(scope="module")
def uninterrupted(ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    assert ranks.play(scenarios.share_rows, folder, 2) == [0, 0]
    return results(folder, 2)


def interrupted(ranks, folder):
    assert ranks.play(scenarios.share_rows, folder, 2, stop=5) == [0, 0]


def test_fewer_ranks_take_the_same_rows_in_every_step(ranks, uninterrupted, tmp_path):
    interrupted(ranks, tmp_path)
    assert ranks.play(scenarios.share_rows, tmp_path, 1) == [0]
    (alone,) = results(tmp_path, 1)
    assert alone["accumulate"] == 2
    assert rows_of([alone]) == {step: rows for step, rows in rows_of(uninterrupted).items() if step >= 4}
    assert alone["weights"] == pytest.approx(uninterrupted[0]["weights"], rel=1e-9)
    assert "accumulate is 2 instead of 1, so that a step still uses 8 rows" in (tmp_path / "log-0").read_text()


def test_ranks_that_cannot_share_the_rows_of_a_step_all_say_so(ranks, tmp_path):
    interrupted(ranks, tmp_path)
    assert ranks.play(scenarios.share_rows, tmp_path, 3) == [0] * 3
    for said in results(tmp_path, 3):
        assert "took 8 rows (2 ranks x batch_size 4 x accumulate 1), which 3 ranks cannot divide evenly" in said
        assert "Start 1 or 2 ranks" in said


def test_a_script_that_shares_the_rows_itself_is_left_alone(ranks, uninterrupted, tmp_path):
    interrupted(ranks, tmp_path)
    assert ranks.play(scenarios.share_rows, tmp_path, 1, batch_size=8) == [0]
    (alone,) = results(tmp_path, 1)
    assert alone["accumulate"] == 1
    assert rows_of([alone]) == {step: rows for step, rows in rows_of(uninterrupted).items() if step >= 4}


def test_another_accumulate_in_the_script_is_its_own_choice_and_logged(ranks, tmp_path):
    interrupted(ranks, tmp_path)
    assert ranks.play(scenarios.share_rows, tmp_path, 1, accumulate=3) == [0]
    assert results(tmp_path, 1)[0]["accumulate"] == 3
    assert "a step now uses 12 rows" in (tmp_path / "log-0").read_text()
