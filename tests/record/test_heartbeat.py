"""`alive.json` and `ended.json`: read back as they were written, and nothing else is taken for one."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest

from surefoot.record.heartbeat import (
    NAME,
    Beat,
    BeatFile,
    ended,
    first_beat,
    first_ended,
    forget_ends,
    mark_end,
    read_beat,
)


def test_a_beat_is_read_as_it_was_written_and_the_file_keeps_its_length(tmp_path):
    beat = replace(first_beat(3, 8), movement="waits", where="train.py:9", waits_in="torch.distributed.barrier", step=7)
    file = BeatFile(tmp_path)
    file.write(beat)
    length = (tmp_path / NAME).stat().st_size
    assert read_beat(tmp_path) == beat
    assert beat.place == "torch.distributed.barrier at train.py:9"
    file.write(replace(beat, movement="moves", where="", waits_in="", count=12_345))
    assert (tmp_path / NAME).stat().st_size == length
    assert read_beat(tmp_path).count == 12_345


def test_a_link_in_the_place_of_the_file_is_replaced_and_a_file_that_was_removed_is_made_again(tmp_path):
    (tmp_path / "theirs").write_text("untouched")
    os.link(tmp_path / "theirs", tmp_path / NAME)
    file = BeatFile(tmp_path)
    file.write(first_beat(0, 2))
    assert (tmp_path / "theirs").read_text() == "untouched"
    os.unlink(tmp_path / NAME)
    file.write(first_beat(0, 2))
    assert read_beat(tmp_path) is not None


def test_a_path_as_long_as_paths_may_be_fits(tmp_path):
    long = replace(
        first_beat(0, 2), **dict.fromkeys(("where", "function", "waits_in", "collective", "launch"), "ä" * 5000)
    )
    BeatFile(tmp_path).write(long)
    assert read_beat(tmp_path) is not None


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "null", '{"rank": 0}', '{"schema": 2, "rank": 0, "world_size": 2}',
     '{"schema": 1, "rank": "0", "world_size": 2}', '{"schema": 1, "rank": 0, "world_size": 2, "seconds": "long"}'],
)  # fmt: skip
def test_what_is_no_beat_is_not_read_as_one(tmp_path, content):
    (tmp_path / NAME).write_text(content)
    assert read_beat(tmp_path) is None


def test_the_first_rank_to_end_is_noted_and_later_ones_are_not(tmp_path):
    mine = first_beat(0, 3)
    assert first_ended(tmp_path, mine) is None
    for rank in (2, 1):
        mark_end(tmp_path, ended(replace(first_beat(rank, 3), step=40 + rank), 1, "ValueError: no"))
    found = first_ended(tmp_path, mine)
    assert (found.rank, found.step, found.code, found.ending) == (2, 42, 1, "ValueError: no")


def test_the_end_of_an_earlier_run_in_the_folder_counts_for_nothing(tmp_path):
    before = replace(ended(first_beat(1, 2), 0, "exit code 0"), time=1000.0)
    mark_end(tmp_path, before)
    mine = first_beat(0, 2)
    assert first_ended(tmp_path, mine) is None
    now = ended(first_beat(0, 2), 0, "exit code 0")
    mark_end(tmp_path, now)  # replaces it
    assert first_ended(tmp_path, mine).rank == 0
    assert first_ended(tmp_path, replace(mine, launch="another start")) is None
    forget_ends(tmp_path, replace(mine, began=now.time + 1))
    assert not (tmp_path / "ended.json").exists()


def test_a_beat_holds_plain_values_only():
    assert json.loads(json.dumps(vars(first_beat(0, 2))))["world_size"] == 2
    assert Beat(0, 1).place == "a line that is not the script's"
