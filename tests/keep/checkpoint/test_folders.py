"""A folder appears whole or not at all, and leftovers of dead processes are removed."""

import os
import subprocess
import sys

import pytest

from surefoot.keep.checkpoint.folders import discard, make_folder, new_folder, sweep


def dead_process():
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_new_folder_is_out_of_sight_until_it_is_whole(tmp_path):
    place = tmp_path / "deep" / "step-1"
    with new_folder(place) as hidden:
        (hidden / "file").write_text("content")
        assert not place.exists()
        assert hidden.name.startswith(".")
    assert (place / "file").read_text() == "content"
    assert os.listdir(place.parent) == ["step-1"]


def test_a_body_that_raises_leaves_what_was_there(tmp_path):
    place = tmp_path / "step-1"
    with new_folder(place) as hidden:
        (hidden / "file").write_text("first")
    with pytest.raises(ZeroDivisionError), new_folder(place) as hidden:
        (hidden / "file").write_text(str(1 / 0))
    assert (place / "file").read_text() == "first"
    assert os.listdir(tmp_path) == ["step-1"]


def test_a_folder_of_the_same_name_is_replaced(tmp_path):
    for text in ("first", "second"):
        with new_folder(tmp_path / "step-1") as hidden:
            (hidden / "file").write_text(text)
    assert (tmp_path / "step-1" / "file").read_text() == "second"
    assert os.listdir(tmp_path) == ["step-1"]


def test_the_place_may_depend_on_what_was_written(tmp_path):
    with new_folder(tmp_path / "one", choose=lambda: tmp_path / "other"):
        pass
    assert os.listdir(tmp_path) == ["other"]


def test_discard_deletes_all_of_a_folder(tmp_path):
    make_folder(tmp_path / "step-1" / "inside")
    discard(tmp_path / "step-1")
    assert os.listdir(tmp_path) == []


def test_sweep_removes_what_a_dead_process_left_and_leaves_the_work_of_a_living_one(tmp_path):
    pid = dead_process()
    (tmp_path / f".step-1.{pid}-5-0123abcd.part").mkdir()
    (tmp_path / f".other.{pid}-5-0123abcd.part").mkdir()
    with new_folder(tmp_path / "step-2"):
        sweep(tmp_path, lambda name: name.startswith("step"))
        assert len(os.listdir(tmp_path)) == 2  # the one under way, and the one that is not ours
    assert sorted(os.listdir(tmp_path)) == [f".other.{pid}-5-0123abcd.part", "step-2"]


def test_sweep_puts_back_a_folder_that_was_moved_aside_for_one_that_never_came(tmp_path):
    aside = tmp_path / f".step-1.{dead_process()}-5-0123abcd.old"
    aside.mkdir()
    (aside / "file").write_text("whole")
    sweep(tmp_path, lambda name: True)
    assert (tmp_path / "step-1" / "file").read_text() == "whole"
