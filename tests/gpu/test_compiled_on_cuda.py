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
print(eval_frame._stance.stance, counters["stats"]["unique_graphs"], model.head.weight.double().sum().item())
"""
CAPTURED = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=FUSED, capturable=True)
data = torch.randn(64, 128, 32, device="cuda")
x = data[0].clone()


def train():
    optimizer.zero_grad()
    loss = (model(x) - x[:, :1]).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss


side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(11):
        train()
torch.cuda.current_stream().wait_stream(side)
graph = torch.cuda.CUDAGraph()
optimizer.zero_grad()
with torch.cuda.graph(graph):
    loss = train()
for step in range(200):
    x.copy_(data[step % 64])
    graph.replay()
print(loss.item(), [each.double().sum().item() for each in model.parameters()])
"""


def process(folder, *words):
    command = [sys.executable, *words]
    ended = subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert "not watched" not in ended.stderr, ended.stderr[-2000:]
    return ended


def run(folder, *words, options=()):
    (folder / "train.py").write_text(SCRIPT)
    ended = process(folder, "-m", "surefoot", "run", "--out", "run", *options, "train.py", *words)
    facts = json.loads((folder / "run" / "facts.json").read_text())
    assert facts["problems"] == {}
    assert facts["steps"] == 400
    assert ended.stdout.split()[:2] == ["default", "1"]
    return facts, json.loads((folder / "run" / "findings.json").read_text())


@pytest.mark.parametrize("words", [[], ["graphs"]], ids=["compiled", "in graphs"])
def test_a_bad_row_that_goes_into_a_compiled_model_is_data(tmp_path, words):
    _, found = run(tmp_path, "nan", *words)
    first = found["findings"][0]
    assert (first["cause"], first["step"]) == ("data.nonfinite-input", 300), found["findings"]
    assert first["evidence"]["argument"] == "features"


@pytest.mark.parametrize("words", [[], ["graphs"]], ids=["compiled", "in graphs"])
def test_a_healthy_compiled_run_is_healthy_and_waits_for_nothing(tmp_path, words):
    _, found = run(tmp_path, *words)
    assert found["verdict"] == "healthy", found["findings"]


def test_a_compiled_run_has_the_bits_of_the_script_alone(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    plain = [process(tmp_path, "train.py").stdout for _ in range(2)]
    assert plain[0] == plain[1], "the script alone has no bits of its own"
    assert process(tmp_path, "-m", "surefoot", "run", "--out", "run", "train.py").stdout == plain[0]


@pytest.mark.parametrize("words", [["eager"], ["eager", "graphs"]], ids=["compiled", "in graphs"])
def test_eager_looks_see_inside_and_compile_nothing_again(tmp_path, words):
    facts, found = run(tmp_path, *words, options=["--eager-looks"])
    assert found["verdict"] == "healthy", found["findings"]
    eager = [each for each in facts["sampled_steps"] if each.get("eager")]
    assert len(eager) >= 4
    assert all(len(each["notes"]["layers"]) == 7 for each in eager)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "foreach"])
def test_a_step_that_is_captured_as_a_whole_has_the_bits_of_the_script_alone(tmp_path, fused):
    (tmp_path / "train.py").write_text(CAPTURED.replace("FUSED", str(fused)))
    plain = process(tmp_path, "train.py")
    watched = process(tmp_path, "-m", "surefoot", "run", "--out", "run", "train.py")
    assert watched.stdout == plain.stdout
    assert "stopped watching" not in watched.stderr, watched.stderr
    facts = json.loads((tmp_path / "run" / "facts.json").read_text())
    assert facts["steps"] == 11  # Python does not run in the others
