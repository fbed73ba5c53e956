"""`rank.jsonl` is read line by line, up to its last whole line, and nothing is followed out of the folder."""

from __future__ import annotations

import json
import os

import pytest

from ranked import MadeRank
from surefoot.errors import UsageError
from surefoot.record.facts import RankOptimizer, RankSetup, ReplicaLook
from surefoot.record.rank_file import NAME, rank_folders, read_rank


def test_what_was_written_is_read_back(tmp_path):
    made = MadeRank(1)
    made.write(tmp_path)
    setup, optimizer, *looks = read_rank(tmp_path / "rank1")
    assert isinstance(setup, RankSetup)
    assert isinstance(optimizer, RankOptimizer)
    assert (setup.rank, optimizer.names) == (1, ["0.weight", "0.bias", "2.weight"])
    assert looks == [made.look(step) for step in made.steps]


def test_a_torn_last_line_is_left_out(tmp_path):
    MadeRank(0).write(tmp_path)
    path = tmp_path / "rank0" / NAME
    whole = list(read_rank(tmp_path / "rank0"))
    path.write_bytes(path.read_bytes()[:-20])
    assert list(read_rank(tmp_path / "rank0")) == whole[:-1]


def test_a_second_run_in_the_same_folder_begins_a_new_file(tmp_path):
    for _ in range(2):
        MadeRank(0, steps=(0, 1)).write(tmp_path)
    assert sum(isinstance(entry, ReplicaLook) for entry in read_rank(tmp_path / "rank0")) == 2


@pytest.mark.parametrize("text", ["", "[]\n", "nonsense\n", '{"kind": "other"}\n', '{"kind": "look", "step": "x"}\n'])
def test_what_is_no_file_of_a_rank_is_empty(tmp_path, text):
    (tmp_path / NAME).write_text(text)
    assert list(read_rank(tmp_path)) == []


def test_no_file_is_empty_and_a_link_or_a_pipe_is_not_followed(tmp_path):
    assert list(read_rank(tmp_path)) == []
    MadeRank(0).write(tmp_path)
    os.symlink(tmp_path / "rank0" / NAME, tmp_path / NAME)
    assert list(read_rank(tmp_path)) == []
    os.mkfifo(tmp_path / "rank0" / "pipe")
    os.unlink(tmp_path / NAME)
    os.rename(tmp_path / "rank0" / "pipe", tmp_path / NAME)
    assert list(read_rank(tmp_path)) == []


def test_a_newer_version_is_refused(tmp_path):
    (tmp_path / NAME).write_text(json.dumps({"kind": "setup", "schema": 99, "rank": 0, "world_size": 2}) + "\n")
    with pytest.raises(UsageError, match="schema 99"):
        list(read_rank(tmp_path))


def test_the_folders_of_ranks_come_in_the_order_of_their_numbers(tmp_path):
    for name in ("rank10", "rank2", "rank0", "ranks", "rank", "rankx"):
        (tmp_path / name).mkdir()
    os.symlink(tmp_path / "rank0", tmp_path / "rank1")
    assert [path.name for path in rank_folders(tmp_path)] == ["rank0", "rank2", "rank10"]
    (tmp_path / "run.json").write_text("{}")
    assert rank_folders(tmp_path) == []
