"""A data loader that stalls is an event while it stalls, with the seconds and which loader it is."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import surefoot as sf
from patience import HANG_SECONDS, Clock, wait_until
from surefoot.record import loader_waits, progress_alarms
from surefoot.record.loader_waits import LoaderNotes, LoaderStalls, follow_loaders, worker_states
from surefoot.record.messages import BatchesDrawn, StepRow
from surefoot.record.progress_alarms import LOADER_STALLED, ProgressAlarms


class Slow(Dataset):
    """Waits before row 2, until it is told to go on."""

    def __init__(self):
        self.go_on = threading.Event()

    def __len__(self):
        return 4

    def __getitem__(self, row):
        if row == 2:
            assert self.go_on.wait(HANG_SECONDS)
        return torch.tensor(row)


def test_a_loader_that_stalls_is_in_the_log_while_it_stalls_and_when_it_continues(tmp_path, monkeypatch):
    monkeypatch.setattr(loader_waits, "LOOK_SECONDS", 0.01)
    data = Slow()
    with sf.RunLog(tmp_path, device_seconds=None, progress=ProgressAlarms(loader_seconds=0.05)) as log:
        follow_loaders(log)
        follow_loaders(log.part("critic"))  # the same log
        assert len(log._writer.sources) == 1
        log.take(StepRow(7, 0.0))

        def alarms():
            log.flush(HANG_SECONDS)
            return [each for each in sf.load_run(tmp_path).events if each.cause == LOADER_STALLED]

        batches = iter(DataLoader(data, batch_size=2))
        next(batches)
        drawing = threading.Thread(target=lambda: next(batches))
        drawing.start()
        wait_until(alarms)
        data.go_on.set()
        drawing.join()
        wait_until(lambda: alarms()[-1].severity == "info")
    first = alarms()[0]
    assert (first.severity, first.step) == ("warning", 7)
    assert first.evidence["loader"] == "the data loader over Slow (batch size 2, no workers)"
    assert first.evidence["seconds"] >= 0.05
    assert "has been asked for a batch for" in first.summary


class Iterator:
    """What the hook sees of a loader's iterator."""

    def __init__(self):
        self._dataset, self._num_workers = [], 0


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(loader_waits, "time", found)
    monkeypatch.setattr(progress_alarms, "time", found)
    return found


def test_a_wait_that_the_loader_has_needed_before_is_no_stall(clock):
    notes, iterator = LoaderNotes(), Iterator()
    stalls = LoaderStalls(notes, 60.0)

    def waits(seconds):
        wait, found = notes.asked([iterator], {}), []
        for _ in range(seconds):
            clock.now += 1
            found += stalls()
        notes.over(wait)
        return [*found, *stalls()]

    assert waits(55) == [BatchesDrawn()]
    assert waits(160) == [BatchesDrawn()]  # less than three times 55
    found = waits(600)
    assert [getattr(each, "severity", None) for each in found] == ["warning", None, "info"]
    assert found[0].evidence["seconds"] == pytest.approx(480, abs=2)
    assert "the longest wait before that was 160 s" in found[0].summary


def test_a_process_that_stands_still_has_no_loader_that_stalls(clock):
    notes, iterator = LoaderNotes(), Iterator()
    stalls = LoaderStalls(notes, 60.0)
    wait = notes.asked([iterator], {})
    assert list(stalls()) == []
    clock.now += 8 * 3600
    assert list(stalls()) == []
    notes.over(wait)


def test_the_workers_of_a_loader_are_described_without_taking_their_status():
    batches = iter(DataLoader(range(4), num_workers=1, persistent_workers=True))
    next(batches)
    (worker,) = batches._workers
    assert worker_states(batches) == [f"worker 0 (pid {worker.pid}) is running"]
    assert worker_states(None) == []
