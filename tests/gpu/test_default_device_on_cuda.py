"""Shuffling on a default device of CUDA: losses are those of the script without `surefoot run`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SCRIPT = """
import torch
from torch import nn
torch.set_default_device("cuda")
torch.manual_seed(0)
x = torch.randn(256, 8); y = (x.sum(1) > 0).long()
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
print(torch.randperm(4).device)
for epoch in range(4):
    order = torch.randperm(256)
    for rows in order.split(32):
        loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        print(loss.item())
with torch.device("meta"): print(torch.randperm(4).device)
"""


def test_a_shuffle_on_the_default_device_is_the_same_under_watch(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    source = str(Path(__file__).parents[2] / "src")
    outputs = []
    for command in (["script.py"], ["-m", "surefoot", "run", "--out", "run", "script.py"]):
        done = subprocess.run(
            [sys.executable, *command],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": source},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
    assert outputs[0].startswith("cuda:0\n")
    assert outputs[1] == outputs[0]
