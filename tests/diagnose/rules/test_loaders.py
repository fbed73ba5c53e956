"""A worker of a data loader that dies is the cause, with how it ended."""

from __future__ import annotations

import pytest

from surefoot.diagnose.engine import diagnose
from surefoot.record.facts import CrashFacts, RunFacts

SCRIPT = """
import os, signal, torch
from torch.utils.data import DataLoader, Dataset

class Fragile(Dataset):
    def __len__(self):
        return 400
    def __getitem__(self, row):
        if row == 200:
            os.kill(os.getpid(), signal.SIGKILL)
        return [float(row % 7)] * 4

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for batch in DataLoader(Fragile(), batch_size=4, num_workers=1, collate_fn=list):
    loss = model(torch.tensor(batch)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_a_worker_that_is_killed_under_surefoot_run_is_named_with_its_signal(watch):
    run = watch(SCRIPT)
    found = run.diagnosis.findings[0]
    assert found.cause == "data.worker-died"
    assert (found.severity, run.diagnosis.verdict) == ("error", "broken")
    assert found.evidence["signal"] == "Killed"
    assert "was killed by a signal (Killed)" in found.summary
    assert "1 workers, batch size 4" in found.summary


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("DataLoader worker (pid 5) is killed by signal: Bus error. It is possible that", "shared memory"),
        ("DataLoader worker (pid 5) is killed by signal: Segmentation fault. ", "accessed invalid memory"),
        ("DataLoader worker (pid 5) exited unexpectedly with exit code 3. Details are lost", "exit code 3"),
        ("DataLoader worker (pid(s) 5, 6) exited unexpectedly", "worker processes 5, 6 ended"),
    ],
)
def test_how_it_ended_says_what_to_do(message, words):
    crash = CrashFacts(type="RuntimeError", message=message, site="train.py:12")
    (found,) = diagnose(RunFacts(steps=30, crash=crash), strict=True).findings
    assert found.cause == "data.worker-died"
    assert words in found.summary


def test_an_exception_inside_of_the_data_set_is_not_a_dead_worker():
    crash = CrashFacts(type="KeyError", message="Caught KeyError in DataLoader worker process 0.", site="train.py:12")
    assert diagnose(RunFacts(steps=30, crash=crash), strict=True).findings == ()
