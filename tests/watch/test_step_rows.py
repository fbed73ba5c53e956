"""Rows of steps are written in order, each once, when all their numbers are known."""

import torch

from surefoot.core import device, device_copies
from surefoot.watch.step_rows import StepRows


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


def arriving(slots: device_copies._NumberSlots) -> device_copies.ArrivingNumber:
    return device_copies.ArrivingNumber(slots.take(), torch.device("cpu"))


def test_a_row_waits_for_its_numbers_and_holds_back_those_behind_it():
    written = []
    rows = StepRows(written.append)
    slots = device_copies._NumberSlots(torch.float32, torch.device("cpu"))
    rows.append({"loss": 1.0}, waits_for_guard=True)
    first = rows._waiting[0]
    first.numbers["clip_norm"] = number = arriving(slots)
    rows.arrived(first.row)
    rows.append({"loss": torch.tensor(2.0), "lr": 0.1})
    assert written == []
    number._slot.place.fill_(3.0)
    rows.append({"loss": 4.0})
    assert [row["loss"] for row in written] == [1.0, 2.0, 4.0]
    assert written[0]["clip_norm"] == 3.0
    assert not rows.waits


def test_a_guard_that_never_reports_does_not_keep_rows_from_the_facts():
    rows = StepRows()
    rows.append({"loss": 1.0}, waits_for_guard=True)
    assert rows.as_facts().loss == [1.0]


def test_numbers_that_a_failed_device_has_not_sent_are_left_out(monkeypatch):
    monkeypatch.setattr(device, "_failure", [("AcceleratorError", "CUDA error: device-side assert triggered")])
    rows = StepRows()
    rows.append({"loss": torch.tensor(0.0), "lr": 0.1})
    slots = device_copies._NumberSlots(torch.float32, torch.device("cpu"))
    for _ in range(2):
        rows.append({"lr": 0.1}, waits_for_guard=True)
        rows._waiting[-1].numbers["loss"] = arriving(slots)
    facts = rows.as_facts()
    assert facts.loss == [0.0, None, None]
    assert facts.lr == [0.1] * 3
