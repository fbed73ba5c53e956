"""Rows of steps are written in order, each once, when all their numbers are known."""

import torch

from surefoot.core import device
from surefoot.watch.step_rows import READ_STEPS_LATER, StepRows


def test_a_complete_row_is_written_at_once():
    written = []
    rows = StepRows(written.append)
    rows.append({"loss": 1.0})
    assert written == [{"loss": 1.0, "step": 0}]
    assert not rows.waits


def test_a_row_waits_for_the_guard_and_holds_back_those_behind_it():
    written = []
    rows = StepRows(written.append)
    first, second = {"loss": 1.0}, {"loss": 2.0}
    rows.append(first, waits_for_guard=True)
    rows.append(second)
    assert written == []
    first["grad_norm"] = 3.0
    rows.arrived(first)
    assert written == [first, second]
    assert rows.as_facts().grad_norm == [3.0, None]


def test_tensors_are_read_some_steps_later_and_all_of_them_at_the_end():
    written = []
    rows = StepRows(written.append)
    for number in range(READ_STEPS_LATER + 2):
        rows.append({"loss": torch.tensor(float(number)), "lr": 0.1})
    assert [row["loss"] for row in written] == [0.0, 1.0]
    assert rows.as_facts().loss == [float(number) for number in range(READ_STEPS_LATER + 2)]
    assert not rows.waits


def test_a_guard_that_never_reports_does_not_keep_rows_from_the_facts():
    rows = StepRows()
    rows.append({"loss": 1.0}, waits_for_guard=True)
    assert rows.as_facts().loss == [1.0]


def test_numbers_that_a_failed_device_has_not_sent_are_left_out(monkeypatch):
    monkeypatch.setattr(device, "_failure", [("AcceleratorError", "CUDA error: device-side assert triggered")])
    rows = StepRows()
    for number in range(3):
        rows.append({"loss": torch.tensor(float(number)), "lr": 0.1})
    for waiting in list(rows._waiting)[1:]:
        memory = torch.full((8,), device._ABSENT, dtype=torch.uint8)  # as before a copy arrives
        waiting.copies = [(["loss"], device.AsyncCopy(memory.view(torch.float64), memory))]
    facts = rows.as_facts()
    assert facts.loss == [0.0, None, None]
    assert facts.lr == [0.1] * 3
