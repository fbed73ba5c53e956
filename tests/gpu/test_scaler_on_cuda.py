"""A gradient scaler on CUDA: what it skips is counted, and reading its scale waits for nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
SKIPPED = [3, *range(20, 65, 5), 70]
TRAIN = """
import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(256, 8, device="cuda"); y = x[:, :1].clone()
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=FUSED)
scaler = torch.amp.GradScaler("cuda", growth_interval=1000)
bad = torch.full_like(model[0].weight, float("inf"))
for step in range(STEPS):
    if step == 310:
        torch.cuda.set_sync_debug_mode("error")
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        out = model(x)
    loss = (out.float() - y).square().mean()
    scaler.scale(loss).backward()
    if step in SKIPPED:
        model[0].weight.grad.copy_(bad)
    scaler.step(optimizer)
    scaler.update()
    if step == 410:
        torch.cuda.set_sync_debug_mode("default")
print(scaler.get_scale())
"""


def facts_of(folder: Path, fused: bool, steps: int) -> tuple[dict, list[dict], str]:
    text = TRAIN.replace("FUSED", str(fused)).replace("STEPS", str(steps)).replace("SKIPPED", str(SKIPPED))
    (folder / "train.py").write_text(text)
    command = [sys.executable, "-m", "surefoot", "run", "--out", "run", "train.py"]
    ended = subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = json.loads((folder / "run" / "findings.json").read_text())["findings"]
    return json.loads((folder / "run" / "facts.json").read_text()), found, ended.stdout


@pytest.mark.parametrize("fused", [True, False])
def test_steps_that_cost_a_good_part_of_the_run_are_a_finding(tmp_path: Path, fused: bool) -> None:
    facts, findings, out = facts_of(tmp_path, fused, 80)
    assert facts["scaler"]["attempts"] == 80
    assert facts["scaler"]["skip_steps"] == SKIPPED
    assert len(facts["scaler"]["trace"]) == 80
    assert facts["scaler"]["scale"] == float(out.split()[-1]) == 32.0
    assert facts["problems"] == {}
    assert "precision.fp16-overflow" in [each["cause"] for each in findings]


def test_steady_steps_with_a_scaler_wait_for_nothing(tmp_path: Path) -> None:
    """A fused optimizer: any other one makes the scaler itself wait."""
    facts, _, _ = facts_of(tmp_path, True, 420)
    assert facts["problems"] == {}
    assert facts["scaler"]["skip_steps"] == SKIPPED
