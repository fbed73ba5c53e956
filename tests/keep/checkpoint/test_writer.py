"""Writing in the background: one state at a time, failures reported, locks held while a thread writes."""

import gc
import logging
import threading
import time

import pytest
import torch

import patience
import surefoot as sf
from surefoot.keep.checkpoint.listing import list_checkpoints
from surefoot.keep.checkpoint.writer import (
    FIRST_PAUSE_SECONDS,
    CheckpointWriter,
    FailedSaves,
    FolderClaim,
    SaveJob,
    duration,
    newest_good_age,
)
from surefoot.keep.staging import Staged

HANG_SECONDS = 60


class Slow(Staged):
    """A state whose copy arrives when it is allowed to."""

    def __init__(self, tree):
        super().__init__(tree)
        self.may_arrive = threading.Event()

    def wait(self):
        self.may_arrive.wait(HANG_SECONDS)


def job(step, staged=None, done=lambda good: None, **facts):
    staged = Staged({"w": torch.ones(2)}) if staged is None else staged
    given = {"quiet": True, "reasons": [], "metric": None, "metric_given": True, "rank": 0, "world_size": 1}
    return SaveJob(step, staged, None, (), given | facts, 3, 1, time.monotonic(), done)


@pytest.fixture
def writer(tmp_path):
    made = CheckpointWriter(tmp_path / "checkpoints", FolderClaim(tmp_path))
    yield made
    made.wait()


def test_a_state_is_written_in_a_thread_and_reported(writer, tmp_path):
    saved, good = [], []
    writer.events.on_saved = lambda step, path, facts: saved.append((step, path.name, facts["finite"]))
    staged = Slow({"w": torch.ones(2)})
    writer.start(job(5, staged, good.append), blocking=False)
    assert writer.is_busy
    assert not writer.is_ready(wait=False)
    staged.may_arrive.set()
    assert writer.is_ready(wait=True)
    assert saved == [(5, "step-00000005", True)]
    assert good == [True]
    assert "The newest good checkpoint is from step 5, 2 steps and" in newest_good_age(tmp_path / "checkpoints", 7)


def test_a_state_that_is_not_finite_is_kept_beside_a_good_one_of_the_same_step(writer, tmp_path, caplog):
    good = []
    writer.start(job(5, done=good.append), blocking=True)
    writer.start(job(5, Staged({"w": torch.tensor([torch.nan])}), good.append), blocking=True)
    assert good == [True, False]
    assert [(each.step, each.aside) for each in list_checkpoints(tmp_path / "checkpoints")] == [(5, False), (5, True)]
    assert "is not finite (w) and is kept as evidence" in caplog.text


def test_a_failure_is_reported_and_so_is_the_save_that_works_again(writer, tmp_path):
    failing, good = [], []
    writer.events.on_failing = lambda step, message, evidence: failing.append(evidence["failures"])
    (tmp_path / "checkpoints").write_text("in the way")
    writer.start(job(1, done=good.append), blocking=True)
    assert isinstance(writer.failed_saves.last_error, OSError)
    (tmp_path / "checkpoints").unlink()
    writer.start(job(2, done=good.append), blocking=True)
    assert (failing, good) == ([1, 0], [False, True])
    assert writer.failed_saves.last_error is None


def test_no_checkpoint_means_that_a_restart_begins_again(tmp_path):
    assert newest_good_age(tmp_path / "missing", 3) == "There is no good checkpoint: a restart starts from step 0."
    assert [duration(seconds) for seconds in (42.4, 600, 20_000)] == ["42 s", "10 min", "5.6 h"]


def test_the_claim_of_a_folder_ends_with_the_last_reference_to_it(tmp_path):
    claim = FolderClaim(tmp_path)
    claim.hold(0)
    lock = claim._holds[0]
    claim.hold(0)
    assert claim._holds[0] is lock
    assert lock.is_held
    del claim
    assert not lock.is_held


def test_a_manager_that_is_dropped_while_it_writes_keeps_its_folder_until_the_state_is_on_the_disk(tmp_path):
    manager, staged = sf.CheckpointManager(tmp_path), Slow({"w": torch.ones(2)})
    assert manager.save(None, 1, staged=staged)
    thread = next(each for each in threading.enumerate() if each.name == "surefoot-checkpoint")
    lock = manager._claim._holds[0]
    del manager
    gc.collect()
    assert lock.is_held
    staged.may_arrive.set()
    thread.join(HANG_SECONDS)
    del thread
    gc.collect()
    assert not lock.is_held
    assert [each.step for each in list_checkpoints(tmp_path / "checkpoints")] == [1]


FULL = OSError(28, "No space left on device")


@pytest.fixture
def clock(monkeypatch):
    made = patience.Clock()
    monkeypatch.setattr("surefoot.keep.checkpoint.writer.time", made)
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
