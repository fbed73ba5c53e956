"""`surefoot run` on CUDA reads no loss at once, and still finds the first bad one, early or late, with its cause."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from surefoot.watch.batch_numbers import BatchNumbers
from surefoot.watch.loss_readings import FIRST_STEPS, LossPlace, LossReadings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}


def place(step):
    return LossPlace(step=step, backward=step, line=None, is_repeated=False)


def busy():
    """Keep the device busy for about a second."""
    torch.cuda._sleep(2_000_000_000)


def test_a_loss_behind_long_work_comes_late_and_in_order():
    readings = LossReadings()
    loss = torch.tensor(3.0, device="cuda")
    assert readings.read(loss + 1, place(FIRST_STEPS - 1))[0] == 4.0, "the first steps are waited for"
    torch.cuda.synchronize()  # and the kernel is loaded, which may wait for the device
    torch.cuda.set_sync_debug_mode("error")
    try:
        busy()
        assert readings.read(loss + 1, place(FIRST_STEPS))[0] is None
        assert readings.read(loss + 2, place(FIRST_STEPS + 1))[0] is None
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [(p.step, value) for p, value in readings.late(wait=True)] == [
        (FIRST_STEPS, 4.0),
        (FIRST_STEPS + 1, 5.0),
    ]


def test_after_a_bad_loss_the_next_are_waited_for():
    readings = LossReadings()
    readings.expect_trouble(100)
    busy()
    assert readings.read(torch.tensor(2.0, device="cuda"), place(120))[0] == 2.0


@pytest.mark.parametrize("target", [torch.randint(0, 5, (64,)), torch.randn(64, 3)], ids=["classes", "numbers"])
def test_numbers_of_a_batch_are_those_of_the_cpu_and_need_no_sync(target):
    x = torch.randn(64, 50)
    on_cpu = BatchNumbers(x, target, True, 16)
    there = x.cuda(), target.cuda()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = BatchNumbers(*there, True, 16)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert found.rows() == on_cpu.rows()
    fields, expected = found.as_fields(), on_cpu.as_fields()
    assert fields.keys() == expected.keys()
    assert fields.get("labels") == expected.get("labels")
    for key in ("input_largest", "target_mean", "target_std", "target_largest"):
        if key in expected:
            assert fields[key] == pytest.approx(expected[key], rel=1e-5, abs=1e-7)


SCRIPT = """
import torch
from torch import nn

torch.manual_seed(0)
WIDTH = {width}
model = nn.Sequential(nn.Linear(32, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
for step in range(1_060):
    x = torch.randn({rows}, 32, device="cuda")
    y = x[:, :1].clone()
    if step == 1_040:
        {fault}
    optimizer.zero_grad()
    loss = (model(x) - y).square().mean()
    loss.backward()
    optimizer.step()
"""


def ran(folder, fault, width, rows, *options):
    (folder / "train.py").write_text(SCRIPT.format(fault=fault, width=width, rows=rows))
    command = [sys.executable, "-m", "surefoot", "run", "--out", "run", *options, "train.py"]
    ended = subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=600)
    assert "stopped watching" not in ended.stderr, ended.stderr[-2000:]
    return json.loads((folder / "run" / "facts.json").read_text()), json.loads(
        (folder / "run" / "findings.json").read_text()
    )


@pytest.mark.parametrize(("width", "rows"), [(64, 64), (8192, 4096)], ids=["host-bound", "device-bound"])
def test_a_bad_row_after_a_thousand_steps_is_named(tmp_path, width, rows):
    facts, findings = ran(tmp_path, "x[3, 5] = float('nan')", width, rows)
    event = next(event for event in facts["events"] if event["event"] == "nonfinite-loss")
    assert event["step"] == 1_040
    assert findings["findings"][0]["cause"] == "data.nonfinite-input", findings["findings"][:2]


def test_with_the_guard_a_bad_step_after_a_thousand_is_skipped_and_the_run_continues(tmp_path):
    facts, findings = ran(tmp_path, "x[3, 5] = float('nan')", 2048, 4096, "--guard")
    skipped = [event for event in facts["events"] if event["event"] == "skip"]
    assert [event["step"] for event in skipped] == [1_040]
    losses = facts["optimizers"][0]["series"]["loss"]
    assert losses[-1] == losses[-1]
    assert findings["findings"][0]["cause"] == "data.nonfinite-input", findings["findings"][:2]
