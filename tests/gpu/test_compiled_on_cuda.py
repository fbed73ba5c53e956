"""Compiled models on CUDA: a bad row is named although its loss is known late, and looks may run eagerly."""

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
SCRIPT = """
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo import eval_frame
from torch._dynamo.utils import counters

torch.manual_seed(0)
x = torch.randn(16384, 64, device="cuda")
y = x[:, :3].argmax(1)
if "nan" in sys.argv:
    x[300 * 32 + 7, 5] = float("nan")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64 if not i else 256, 256) for i in range(6))
        self.head = nn.Linear(256, 3)

    def forward(self, features):
        for layer in self.layers:
            features = torch.relu(layer(features))
        return self.head(features)


model = Net().cuda()
net = torch.compile(model, **({"mode": "reduce-overhead"} if "graphs" in sys.argv else {}))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
load = torch.randn(4096, 4096, device="cuda")
checked = "nan" not in sys.argv and "eager" not in sys.argv
for step in range(400):
    for _ in range(4):
        load @ load  # the device is the slower one: losses arrive late
    if checked and step == 330:
        torch.cuda.set_sync_debug_mode("error")
    rows = slice(32 * step, 32 * step + 32)
    loss = F.cross_entropy(net(x[rows]), y[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
torch.cuda.set_sync_debug_mode("default")
print(eval_frame._stance.stance, counters["stats"]["unique_graphs"])
"""


def run(folder, *words, options=()):
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "surefoot", "run", "--out", "run", *options, "train.py", *words]
    ended = subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert "not watched" not in ended.stderr, ended.stderr[-2000:]
    facts = json.loads((folder / "run" / "facts.json").read_text())
    assert facts["problems"] == {}
    assert facts["steps"] == 400
    assert ended.stdout.split() == ["default", "1"]
    return facts, json.loads((folder / "run" / "findings.json").read_text())


@pytest.mark.parametrize("words", [[], ["graphs"]], ids=["compiled", "in graphs"])
def test_a_bad_row_that_goes_into_a_compiled_model_is_data(tmp_path, words):
    _, found = run(tmp_path, "nan", *words)
    first = found["findings"][0]
    assert (first["cause"], first["step"]) == ("data.nonfinite-input", 300), found["findings"]
    assert first["evidence"]["argument"] == "features"


def test_a_healthy_compiled_run_is_healthy_and_waits_for_nothing(tmp_path):
    _, found = run(tmp_path)
    assert found["verdict"] == "healthy", found["findings"]


def test_eager_looks_see_inside_and_compile_nothing_again(tmp_path):
    facts, found = run(tmp_path, "eager", options=["--eager-looks"])
    assert found["verdict"] == "healthy", found["findings"]
    eager = [each for each in facts["sampled_steps"] if each.get("eager")]
    assert len(eager) >= 4
    assert all(len(each["notes"]["layers"]) == 7 for each in eager)
