"""Which processes wrote into a run folder, and where each of them began."""

import os
import shutil

from surefoot.record.segments import FOLDER
from surefoot.record.sessions import Session, adopt, first_steps


def test_every_session_gets_a_number_of_its_own(tmp_path):
    first, second = Session(tmp_path), Session(tmp_path)
    assert (first.number, second.number) == (0, 1)
    first.close()
    second.close()


def test_a_number_that_was_given_back_is_used_again(tmp_path):
    session = Session(tmp_path)
    session.withdraw()
    assert list((tmp_path / FOLDER).iterdir()) == []
    assert Session(tmp_path).number == 0


def test_numbers_of_segments_are_taken_too(tmp_path):
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "scalars-004-0-00000.arrows").touch()
    assert Session(tmp_path).number == 5


def test_the_lowest_first_step_of_each_part_is_kept_and_torn_lines_are_not_read(tmp_path):
    session = Session(tmp_path)
    session.began("", 20)
    session.began("", 30)
    session.began("", 10)
    session.began("critic", 7)
    session.close()
    with (tmp_path / FOLDER / "session-000.jsonl").open("a") as file:
        file.write('{"part": "", "fir')
    assert first_steps(tmp_path) == {(0, ""): 10, (0, "critic"): 7}


def test_a_session_is_adopted_once_its_process_has_let_go_and_by_one_process_only(tmp_path):
    session = Session(tmp_path)
    assert adopt(tmp_path, before=1) == {}
    session.close()
    adopted = adopt(tmp_path, before=1)
    assert list(adopted) == [0]
    assert adopt(tmp_path, before=1) == {}
    adopted[0].close()
    assert adopt(tmp_path, before=0) == {}


def test_a_run_that_was_resumed_many_times_has_no_more_files_open(tmp_path):
    for _ in range(30):
        Session(tmp_path).close()
    before = len(os.listdir("/proc/self/fd"))
    adopted = adopt(tmp_path, before=30)
    assert list(adopted) == list(range(30))
    assert len(os.listdir("/proc/self/fd")) == before + 1
    assert adopt(tmp_path, before=30) == {}
    adopted[0].close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_folder_that_was_deleted_or_replaced_is_noticed(tmp_path):
    session = Session(tmp_path)
    assert not session.vanished()
    shutil.rmtree(tmp_path / FOLDER)
    assert session.vanished()
    Session(tmp_path)
    assert session.vanished()
