"""How a worker of a data loader ended, from torch's real errors, and when the error is raised."""

from __future__ import annotations

import os
import signal

import pytest
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import signal_handling

from surefoot.keep.dead_workers import (
    DeferringHandler,
    WorkerDeath,
    WorkerErrors,
    error_of_worker,
    is_workers_handler,
    worker_death,
)


@pytest.fixture(autouse=True)
def _torchs_handler(monkeypatch):
    """An earlier test of this process may have stopped a run, which removes torch's handler."""
    before = signal.getsignal(signal.SIGCHLD)
    if not is_workers_handler(before):
        monkeypatch.setattr(signal_handling, "_SIGCHLD_handler_set", False)
    yield
    signal.signal(signal.SIGCHLD, before)


class EndsItself(Dataset):
    """The worker that loads row 3 ends in this way."""

    def __init__(self, end):
        self.end = end

    def __len__(self):
        return 8

    def __getitem__(self, row):
        if row == 3:
            self.end()
        return row


ENDS = {
    "killed": (lambda: os.kill(os.getpid(), signal.SIGKILL), "Killed", None, "was killed by a signal (Killed)"),
    "exits": (lambda: os._exit(7), "", 7, "ended with exit code 7"),
}


@pytest.mark.parametrize("how", ENDS)
def test_the_error_of_a_dead_worker_says_how_it_ended(how):
    end, name, code, words = ENDS[how]
    with pytest.raises(RuntimeError) as caught:
        list(DataLoader(EndsItself(end), batch_size=1, num_workers=1, collate_fn=list))
    found = error_of_worker(caught.value)
    death = worker_death(str(found))
    assert (death.signal, death.exit_code) == (name, code)
    assert words in death.how


def test_an_error_inside_of_the_data_set_is_no_death():
    def fail():
        raise KeyError("label")

    with pytest.raises(KeyError) as caught:
        list(DataLoader(EndsItself(fail), batch_size=1, num_workers=1, collate_fn=list))
    assert error_of_worker(caught.value) is None


def test_workers_of_which_only_the_end_is_known():
    death = worker_death("DataLoader worker (pid(s) 12, 13) exited unexpectedly")
    assert death == WorkerDeath((12, 13))
    assert death.how == "worker processes 12, 13 ended in an unknown way"


def test_an_error_in_the_middle_of_a_step_is_raised_before_the_next_and_the_handler_is_put_back():
    loader = DataLoader(range(8), batch_size=1, num_workers=1)
    batches, errors = iter(loader), WorkerErrors()
    torchs = signal.getsignal(signal.SIGCHLD)
    assert is_workers_handler(torchs)
    errors.draw(batches, between=True)
    assert isinstance(signal.getsignal(signal.SIGCHLD), DeferringHandler)
    (worker,) = batches._workers
    worker.kill()
    os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
    signal.raise_signal(signal.SIGCHLD)  # here, in the middle of a step, torch would raise
    with pytest.raises(RuntimeError, match="killed by signal: Killed"):
        errors.draw(batches, between=True)
    errors.close()
    assert signal.getsignal(signal.SIGCHLD) is torchs
