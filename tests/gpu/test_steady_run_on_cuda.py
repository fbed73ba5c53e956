"""`surefoot run` on CUDA: steady steps wait for nothing, and every number of theirs still arrives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from surefoot.watch.measuring_budget import FIRST_STEPS, LONGEST_GAP_WITH_NORMS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
STEPS = 420
SCRIPT = f"""
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), SETTINGS)
x = torch.randn(256, 32, device="cuda")
y = x[:, :1].clone()
for step in range({STEPS}):
    if step == 310:
        torch.cuda.set_sync_debug_mode("error")
    optimizer.zero_grad()
    (model(x) - y).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step == 410:
        torch.cuda.set_sync_debug_mode("default")
"""

LOADER = f"""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 3)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
x = torch.randn(64, 32, device="cuda")
y = x[:, :3].argmax(1)
step, told = 0, []
for epoch in range({STEPS}):  # four batches on the device, each a microbatch, are one step
    if step == 310:
        torch.cuda.set_sync_debug_mode("error")
    for rows, labels in DataLoader(TensorDataset(x, y), batch_size=16):
        loss = nn.functional.cross_entropy(model(rows), labels) / 4
        loss.backward()
        told.append(loss.detach())
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    if step == 410:
        torch.cuda.set_sync_debug_mode("default")
torch.save(torch.stack(told).view(-1, 4).sum(1).cpu(), "told.pt")
"""

WORKERS = """
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(64, 8)
model = torch.nn.Linear(8, 1).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):  # workers are forked after the device was used
    for (rows,) in DataLoader(TensorDataset(x), batch_size=16, num_workers=2):
        optimizer.zero_grad()
        (model(rows.cuda()) - 1).square().mean().backward()
        optimizer.step()
"""


def test_processes_forked_after_the_device_was_used_report_nothing(tmp_path):
    """A forked process seeds `random` before any other function runs: that call is observed, and must not raise."""
    (tmp_path / "train.py").write_text(WORKERS)
    command = [sys.executable, "-m", "surefoot", "run", "--out", "run", "train.py"]
    ended = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert "Exception ignored" not in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    "settings",
    ["lr=1e-3, fused=True", "lr=1e-3, fused=False", 'lr=torch.tensor(1e-3, device="cuda"), fused=True'],
)
def test_steady_steps_start_no_sync_and_lose_no_number(tmp_path, settings):
    (tmp_path / "train.py").write_text(SCRIPT.replace("SETTINGS", settings))
    command = [sys.executable, "-m", "surefoot", "run", "--out", "run", "train.py"]
    ended = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert "stopped watching" not in ended.stderr
    facts = json.loads((tmp_path / "run" / "facts.json").read_text())
    assert facts["problems"] == {}
    series = facts["optimizers"][0]["series"]
    for name in ("loss", "clip_norm", "lr"):
        assert len(series[name]) == STEPS, name
        assert all(isinstance(value, float) for value in series[name]), name
    measured = [step for step, norm in enumerate(series["grad_norm"]) if isinstance(norm, float)]
    assert measured[:FIRST_STEPS] == list(range(FIRST_STEPS))
    gaps = [later - earlier for earlier, later in pairwise([*measured, STEPS])]
    assert max(gaps) <= LONGEST_GAP_WITH_NORMS


def test_batches_on_the_device_are_recorded_without_a_sync(tmp_path):
    (tmp_path / "train.py").write_text(LOADER)
    command = [sys.executable, "-m", "surefoot", "run", "--out", "run", "train.py"]
    ended = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr[-2000:]
    facts = json.loads((tmp_path / "run" / "facts.json").read_text())
    assert facts["problems"] == {}
    prints = [batch["print"] for batch in facts["batches"]]
    assert len(prints) == 4 * STEPS
    assert prints[:4] == prints[-4:]
    assert len(set(prints)) == 4
    assert sum(facts["batches"][0]["labels"].values()) == 16
    told = torch.load(tmp_path / "told.pt").tolist()
    assert facts["optimizers"][0]["series"]["loss"] == pytest.approx(told, rel=1e-4)


BROKEN = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
x = torch.randn(512, 8, device="cuda")
y = x.sum(1, keepdim=True)
for step in range(1100):
    rows = torch.randint(512, (32,), device="cuda")
    out = model(x[rows])
    loss = (out - y[rows]).square().mean()
    if step == 1005:
        loss = loss + (out * 0).abs().sqrt().sum()  # finite, but its derivative at 0 is not
    optimizer.zero_grad()
    loss.backward()
    CLIP
    optimizer.step()
"""


@pytest.mark.parametrize("clip", ["pass", "nn.utils.clip_grad_norm_(model.parameters(), 1.0)"])
def test_gradients_that_are_not_finite_are_found_at_a_step_that_is_not_measured(tmp_path, clip):
    (tmp_path / "train.py").write_text(BROKEN.replace("CLIP", clip))
    command = [sys.executable, "-m", "surefoot", "run", "--out", "run", "train.py"]
    ended = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=600)
    found = json.loads((tmp_path / "run" / "findings.json").read_text())["findings"][0]
    assert (found["cause"], found["step"]) == ("loss.undefined-op", 1005), ended.stderr[-2000:]
