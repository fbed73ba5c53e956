"""A save that fails is logged at growing intervals, not at every step."""

import logging

import pytest

import patience
from surefoot.keep.checkpoint import failed_saves
from surefoot.keep.checkpoint.failed_saves import FIRST_PAUSE_SECONDS, FailedSaves

FULL = OSError(28, "No space left on device")


@pytest.fixture
def clock(monkeypatch):
    made = patience.Clock()
    monkeypatch.setattr(failed_saves, "time", made)
    return made


def fail(saves, count, error=FULL):
    """The messages of so many failures in a row; `None` where nothing was logged."""
    return [saves.failed(error, step, "here", lambda: "Nothing is saved.") for step in range(count)]


def test_the_first_failure_is_logged_then_the_fourth_and_the_sixteenth(clock):
    logged = [number for number, message in enumerate(fail(FailedSaves(), 20), 1) if message]
    assert logged == [1, 4, 16]


def test_after_ten_minutes_it_is_logged_again_with_the_number_of_failures(clock):
    saves = FailedSaves()
    fail(saves, 2)
    clock.now += FIRST_PAUSE_SECONDS
    (message,) = fail(saves, 1)
    assert "3 consecutive saves have failed" in message
    assert message.endswith("Nothing is saved.")


def test_another_kind_of_failure_is_logged_at_once(clock):
    saves = FailedSaves()
    fail(saves, 1)
    assert fail(saves, 1, OSError(5, "Input/output error"))[0]
    assert saves.failures == 2


def test_a_save_that_works_starts_the_count_anew(clock, caplog):
    saves = FailedSaves()
    fail(saves, 3)
    with caplog.at_level(logging.INFO, logger="surefoot"):
        assert saves.succeeded(7) == "checkpoints can be written again: step 7 is on the disk."
    assert (saves.failures, saves.last_error) == (0, None)
    assert saves.succeeded(8) is None
    assert fail(saves, 1)[0]


def test_a_warning_of_one_kind_is_logged_once_until_a_save_works(caplog):
    saves = FailedSaves()
    for _ in range(2):
        saves.warn_once("vanished", "the folder has vanished")
    assert len(caplog.records) == 1
    saves.succeeded(0)
    saves.warn_once("vanished", "the folder has vanished")
    assert len(caplog.records) == 2
