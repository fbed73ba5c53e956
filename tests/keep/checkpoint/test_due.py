"""When the next checkpoint is due, for one process and for several."""

from __future__ import annotations

import patience
from surefoot.keep.checkpoint.due import Due


def due_steps(due: Due, steps: range, together: bool = False, good: bool = True) -> list[int]:
    """The steps at which a save is due, if each is written at once."""
    found = []
    for step in steps:
        if due.at(step, together):
            found.append(step)
            due.end(step, due.begin(step), good)
    return found


def test_one_process_saves_at_every_multiple():
    assert due_steps(Due(10, None), range(35)) == [10, 20, 30]


def test_a_step_that_was_passed_over_is_saved_at_the_next_one():
    assert due_steps(Due(10, None), range(7, 50, 7)) == [14, 21, 35, 42]


def test_a_save_that_was_not_good_stays_due():
    assert due_steps(Due(10, None), range(13), good=False) == [10, 11, 12]


def test_while_a_save_is_written_none_is_due_before_the_next_multiple():
    due = Due(10, None)
    due.begin(10)
    assert [step for step in range(10, 25) if due.at(step, together=False)] == [20, 21, 22, 23, 24]


def test_several_processes_save_the_multiples_only_and_each_once_whatever_became_of_it():
    assert due_steps(Due(10, None), range(35), together=True, good=False) == [10, 20, 30]
    assert due_steps(Due(10, None), range(7, 50, 7), together=True) == []


def test_after_a_return_to_an_earlier_step_its_multiples_are_due_again():
    due = Due(10, None)
    assert due_steps(due, range(25)) == [10, 20]
    assert due_steps(due, range(12, 35)) == [20, 30]


def test_a_save_that_ends_after_a_return_does_not_count():
    due = Due(10, None)
    assert due.at(20, together=False)
    line = due.begin(20)
    assert due_steps(due, range(12, 14)) == [12], "training has returned to a step that was never saved"
    due.end(20, line, good=True)
    assert due_steps(due, range(14, 25)) == [20]


def test_after_loading_a_step_the_next_multiple_is_due():
    due = Due(10, None)
    due.restart(20)
    assert due_steps(due, range(20, 35)) == [30]
    assert due_steps(due, range(35, 36), together=True) == []


def test_minutes_count_from_the_last_good_save(monkeypatch):
    clock = patience.Clock()
    monkeypatch.setattr("surefoot.keep.checkpoint.due.time", clock)
    due = Due(None, 2.0)
    clock.now += 119
    assert not due.at(6, together=False)
    clock.now += 1
    assert due.at(7, together=False)
    due.end(7, due.begin(7), good=False)
    assert due.at(8, together=False), "it failed"
    due.end(8, due.begin(8), good=True)
    assert not due.at(9, together=False)
