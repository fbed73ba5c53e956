"""Which rank the others wait for, from what the ranks say of themselves."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from surefoot.record.heartbeat import Beat, BeatFile, first_beat
from surefoot.record.rank_peers import NAME, Hang, Peers, PeerState, find_hang, hang_of, read_hang, write_hang

BARRIER = "torch.distributed.barrier"


def seen(rank, movement="waits", condition="alive", **fields):
    usual = {"where": "train.py:30", "step": 12, "waits_in": BARRIER if movement == "waits" else "", "seconds": 31.0}
    return PeerState(rank, Beat(rank, 4, movement=movement, **(usual | fields)), condition)


def hang(*ranks, is_long=False):
    return find_hang(ranks, Beat(0, len(ranks)), 31.0, is_long=is_long)


@pytest.mark.parametrize(
    ("odd", "kind"),
    [
        (seen(2, "stands", where="data.py:7"), "stands"),
        (seen(2, "ended", ending="exit code 0", where="data.py:7"), "ended"),
        (seen(2, "moves", "gone", where="data.py:7"), "gone"),
        (seen(2, "moves", "stopped", where="data.py:7"), "stopped"),
        (seen(2, "moves", "silent", where="data.py:7"), "silent"),
        (seen(2, where="data.py:7", waits_in="torch.distributed.all_reduce"), "apart"),
        (seen(2, where="data.py:7"), "apart"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_the_odd_rank_is_named_with_its_line_and_step(odd, kind):
    found = hang(seen(0), seen(1), odd, seen(3))
    assert (found.kind, found.ranks, found.where, found.step) == (kind, [2], "data.py:7", 12)
    assert (found.waiting, found.waiting_rank) == (3, 0)
    assert found.summary.startswith("rank 2 ")
    assert "12 steps" in found.summary
    assert f"{BARRIER} at train.py:30" in found.summary
    assert found.evidence()["rank"] == 2


@pytest.mark.parametrize(
    "others",
    [
        seen(2, "moves"),
        seen(2, "busy"),
        seen(2, "debugged"),
        PeerState(2, None, "absent"),
        seen(2, condition="unsure"),
    ],
    ids=["evaluates", "computes in one line", "held by a debugger", "not started", "its process works"],
)
def test_as_long_as_one_rank_may_be_at_work_nobody_is_named(others):
    assert hang(seen(0), seen(1, "stands"), others) is None
    assert hang(seen(0), seen(1), others, is_long=True) is None


def test_ranks_that_stand_while_none_waits_are_no_hang():
    assert hang(seen(0, "stands"), seen(1, "stands"), is_long=True) is None
    assert hang(seen(0, "ended"), seen(1, "stands")) is None
    assert hang(seen(0, "ended"), seen(1, "ended")) is None


def test_a_rank_on_a_gpu_may_wait_with_a_busy_cpu():
    assert hang(seen(0, "busy", on_device=True), seen(1, "stands")).ranks == [1]


def test_all_ranks_in_one_place_are_a_hang_without_an_odd_rank_and_only_after_long():
    assert hang(seen(0), seen(1)) is None
    found = hang(seen(0), seen(1), is_long=True)
    assert (found.kind, found.ranks) == ("together", [])


def test_another_step_is_another_place():
    assert hang(seen(0), seen(1, step=11), seen(2)).ranks == [1]


def test_of_several_that_left_the_first_to_end_is_the_odd_one():
    ranks = [seen(0), seen(1, "ended", time=20.0), seen(2, "ended", time=10.0), seen(3, "moves", "gone")]
    assert hang(*ranks).ranks == [2, 1, 3]


# ---- what is known of a process -------------------------------------------------------------------------------------


def write(top, beat):
    (top / f"rank{beat.rank}").mkdir(exist_ok=True)
    BeatFile(top / f"rank{beat.rank}").write(beat)


def test_a_rank_is_silent_once_its_file_has_not_been_written_for_long_by_the_readers_own_clock(tmp_path):
    peers = Peers(tmp_path, first_beat(0, 2), 20.0)
    theirs = replace(first_beat(1, 2), machine="another one")
    assert peers.look(1, 1.0).condition == "absent"
    write(tmp_path, theirs)
    assert peers.look(1, 1.0).condition == "unsure"  # it may be from an earlier run
    for _ in range(19):
        assert peers.look(1, 1.0).condition == "alive"
    assert peers.look(1, 1.0).condition == "silent"
    write(tmp_path, replace(theirs, count=1))
    assert peers.look(1, 1.0).condition == "alive"
    write(tmp_path, replace(theirs, count=2, movement="unwatched"))
    assert peers.look(1, 100.0).condition == "unsure"


def test_a_process_of_this_machine_that_is_gone_is_known_at_once(tmp_path):
    child = os.fork()
    if child == 0:
        os._exit(0)
    theirs = replace(first_beat(1, 2), process=child)
    os.waitpid(child, 0)
    write(tmp_path, theirs)
    assert Peers(tmp_path, first_beat(0, 2), 20.0).look(1, 0.0).condition == "gone"
    elsewhere = replace(theirs, machine=f"{theirs.machine} of another container")  # with the name of the same host
    write(tmp_path, elsewhere)
    assert Peers(tmp_path, first_beat(0, 2), 20.0).look(1, 0.0).condition == "unsure"


def test_files_of_another_start_count_for_nothing(tmp_path):
    write(tmp_path, replace(first_beat(1, 2), launch="yesterday"))
    write(tmp_path, first_beat(2, 3))
    peers = Peers(tmp_path, first_beat(0, 2), 20.0)
    assert [peers.look(rank, 1.0).condition for rank in (1, 2)] == ["absent", "absent"]


def test_a_hang_is_read_as_it_was_written_until_it_is_over(tmp_path):
    mine = first_beat(0, 3)
    found = replace(hang(seen(0), seen(1, "stands")), launch=mine.launch, time=mine.began + 40.0)
    write_hang(tmp_path, found)
    assert hang_of(tmp_path, mine) == read_hang(tmp_path) == found
    assert hang_of(tmp_path, replace(mine, began=found.time + 1)) is None
    write_hang(tmp_path, replace(found, over_after=50.0))
    assert hang_of(tmp_path, mine) is None
    (tmp_path / NAME).write_text('{"schema": 1, "ranks": 5}')
    assert read_hang(tmp_path) is None
    assert isinstance(found, Hang)
