"""Ranks that watch each other through their files, in one process: each watches a thread, and time passes by hand."""

from __future__ import annotations

import json
import os
import threading

import pytest

import patience
from surefoot.record.heartbeat import Beat, BeatFile, read_beat
from surefoot.record.rank_peers import read_hang
from surefoot.record.rank_watch import CAUSE, STACKS, STRAGGLER, RankWatch
from surefoot.record.stragglers import StepClock

LIMIT = 30.0
COLLECTIVE = os.path.join("site-packages", "torch", "distributed", "distributed_c10d.py")


class Rank:
    """A rank whose training thread is in a line of `train.py`, or in a collective that was called there."""

    def __init__(self, top, number, count, collective=None):
        self.clock, self.events, self.said = StepClock(), [], []
        self._go, inside = threading.Event(), threading.Event()

        def wait():
            inside.set()
            self._go.wait(patience.HANG_SECONDS)

        scope = {"wait": wait}
        exec(
            compile(f"\ndef {collective or 'load'}():\n    wait()\n", COLLECTIVE if collective else "data.py", "exec"),
            scope,
        )
        exec(compile(f"def train():\n    {collective or 'load'}()\n", "train.py", "exec"), scope)
        self._thread = threading.Thread(target=scope["train"], daemon=True)
        self._thread.start()
        inside.wait(patience.HANG_SECONDS)
        self.watch = RankWatch(
            top / f"rank{number}", number, count, clock=self.clock, notify=self.events.append, say=self.said.append,
            thread=lambda: self._thread.ident, limit_seconds=LIMIT,
        )  # fmt: skip
        (top / f"rank{number}").mkdir()

    def end(self):
        self._go.set()
        self._thread.join(patience.HANG_SECONDS)


@pytest.fixture
def ranks(tmp_path, monkeypatch):
    """Starts ranks, each given as the collective it is in or `None`, and ends them."""
    monkeypatch.setattr("surefoot.core.stacks.is_users", lambda name: name in ("train.py", "data.py"))
    made = []

    def start(*collectives):
        made.extend(Rank(tmp_path, n, len(collectives), each) for n, each in enumerate(collectives))
        return made

    yield start
    for each in made:
        each.end()


def pass_time(ranks, seconds):
    for _ in range(seconds):
        for each in ranks:
            each.watch.look(1.0)


def test_a_rank_that_stands_is_named_by_all_within_a_minute_with_every_stack_and_its_line(ranks, tmp_path):
    every = ranks("barrier", "barrier", None)
    for each in every:
        each.clock.stepped(40)
    pass_time(every, 20)
    assert not any(each.events for each in every)
    pass_time(every, 39)
    for number, each in enumerate(every):
        assert [(event.cause, event.severity) for event in each.events] == [(CAUSE, "warning")]
        assert each.events[0].evidence["rank"] == 2
        assert each.events[0].evidence["line"] == "data.py:3"
        assert each.events[0].step == 40
        assert "rank 2 has made no progress" in each.said[0]
        assert 'File "train.py", line 2, in train' in (tmp_path / f"rank{number}" / STACKS).read_text()
    assert read_beat(tmp_path / "rank0").waits_in == "torch.distributed.barrier"


def test_ranks_that_go_on_say_so_and_the_next_such_stop_is_given_more_time(ranks, tmp_path):
    every = ranks("barrier", None)
    pass_time(every, 45)
    assert read_hang(tmp_path).over_after is None
    for each in every:
        each.clock.stepped(1)
    pass_time(every, 2)
    assert [each.events[-1].severity for each in every] == ["info", "info"]
    assert "continues after" in every[0].said[-1]
    assert read_hang(tmp_path).over_after is not None
    pass_time(every, 45)
    assert all(len(each.events) == 2 for each in every)


def test_ranks_in_different_collectives_are_distinguished(ranks):
    every = ranks("barrier", "all_gather", "barrier")
    pass_time(every, 45)
    evidence = every[0].events[0].evidence
    assert (evidence["kind"], evidence["rank"]) == ("apart", 1)
    assert "torch.distributed.all_gather" in every[0].events[0].summary


def test_a_rank_that_ended_is_named_by_those_that_wait_for_it(ranks):
    every = ranks("barrier", "barrier", None)
    pass_time(every, 3)
    every[2].watch.end(0, "exit code 0 at train.py:9", where="train.py:9")
    assert every[0].watch.rank_that_ended() == "rank 2 has ended after 0 steps (exit code 0 at train.py:9)"
    pass_time(every[:2], 45)
    assert [each.events[0].evidence["kind"] for each in every[:2]] == ["ended", "ended"]
    assert all("exit code 0 at train.py:9" in each.said[0] for each in every[:2])


def test_without_the_files_of_the_others_a_rank_says_only_that_it_waits_and_where(ranks):
    alone = ranks("barrier", "barrier")[0]
    pass_time([alone], 59)
    assert not alone.events
    pass_time([alone], 10)
    assert [event.severity for event in alone.events] == ["info"]
    assert alone.events[0].evidence["line"] == "train.py:2"
    assert "does not hold their files" in alone.said[0]


def test_only_the_lowest_rank_reads_the_files_of_all(ranks, tmp_path, monkeypatch):
    every = ranks(*["barrier"] * 5, None)
    read = []
    original = read_beat
    monkeypatch.setattr(
        "surefoot.record.rank_peers.read_beat", lambda folder: read.append(folder.name) or original(folder)
    )
    pass_time(every[1:], 25)  # the first rank has not been heard of
    assert "rank5" in read
    pass_time(every, 2)
    read.clear()
    pass_time(every[1:], 1)
    assert set(read) == {"rank0"}
    pass_time(every[:1], 25)
    assert set(read) == {f"rank{number}" for number in range(6)}


def test_a_straggler_is_an_event_of_the_first_rank(ranks, tmp_path):
    first = ranks(None, None)[0]
    slow = Beat(1, 2, launch=first.watch._beat.launch, own_ms=30.0, step_ms=60.0, measured_steps=64, step=500)
    steps = iter(range(10_000))
    first.clock.medians = lambda: (10.0, 60.0, 64)
    for _ in range(140):
        first.clock.stepped(next(steps))
        BeatFile(tmp_path / "rank1").write(slow)
        first.watch.look(1.0)
    assert [event.cause for event in first.events] == [STRAGGLER]
    assert first.events[0].evidence["times_slower"] == 3.0


def test_a_folder_that_cannot_be_written_ends_the_watch_and_nothing_else(tmp_path):
    said = []
    (tmp_path / "file").write_text("")
    watch = RankWatch(tmp_path / "file" / "rank0", 0, 2, clock=StepClock(), notify=said.append, say=said.append)
    watch.start()
    assert len(said) == 1
    assert "are not detected" in said[0]
    watch.end(0, "exit code 0")


def test_the_thread_writes_and_ends_when_the_log_does(tmp_path):
    over = threading.Event()
    watch = RankWatch(
        tmp_path / "rank0", 0, 2, clock=StepClock(), notify=print, is_over=over.is_set, limit_seconds=1.0
    ).start()
    patience.wait_until(lambda: (read_beat(tmp_path / "rank0") or Beat(0, 2)).count > 2)
    over.set()
    patience.wait_until(lambda: json.loads((tmp_path / "rank0" / "alive.json").read_text())["movement"] == "unwatched")
    watch.end(3, "exit code 3")
    assert read_beat(tmp_path / "rank0").code == 3
