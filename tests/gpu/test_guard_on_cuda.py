"""`surefoot run --guard` on a CUDA device. Left out where there is none."""

from __future__ import annotations

import json
import os
import re
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
CASES = ROOT / "tests" / "watch" / "guarded_steps.py"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}


def run(folder, *command):
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=600
    )


def watched(folder, *arguments):
    return run(folder, "-m", "surefoot", "run", "--out", "run", *arguments)


def test_a_bad_step_on_cuda_leaves_no_trace_in_any_optimizer(tmp_path):
    ended = watched(tmp_path, "--guard", str(CASES), "cuda")
    assert ended.returncode == 0, ended.stderr[-2000:]
    told = json.loads(ended.stdout.splitlines()[-1])
    assert told["failed"] == {}
    guarded = json.loads((tmp_path / "run" / "run.json").read_text())["guarded"]
    assert guarded["skipped"] == 2 * (told["cases"] - 5)  # the scaler's own overflows, and a gradient that was mended
    assert guarded["not_guarded"] == {}
    assert len(guarded["parameters"]) == 20
    # The name is looked up when the numbers have arrived; by then several models may be known.
    assert re.search(r"not finite: the gradients of (\w+\.)?second\.weight", ended.stderr)


def test_without_a_bad_step_on_cuda_the_guard_changes_no_bit(tmp_path):
    plain = run(tmp_path, str(CASES), "cuda", "healthy")
    assert plain.returncode == 0, plain.stderr[-2000:]
    assert json.loads(watched(tmp_path, "--guard", str(CASES), "cuda", "healthy").stdout) == json.loads(plain.stdout)


SYNCS = """
import json, sys, warnings
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 1)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), fused=sys.argv[1] == "fused", foreach=False)
x = torch.randn(64, 32, device="cuda")
counts = []
for step in range(420):
    with warnings.catch_warnings(record=True) as waits:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        torch.cuda.set_sync_debug_mode("default")
    counts.append(sum("synchronizing" in str(each.message) for each in waits))
print(json.dumps(counts[300:]))
"""


@pytest.mark.parametrize("kind", ["fused", "plain"])
def test_the_guard_waits_for_the_device_once_a_step_and_with_a_fused_optimizer_never(tmp_path, kind):
    (tmp_path / "train.py").write_text(SYNCS)
    bare = json.loads(watched(tmp_path, "train.py", kind).stdout)
    guarded = json.loads(watched(tmp_path, "--guard", "train.py", kind).stdout)
    more = sorted(b - a for a, b in zip(bare, guarded, strict=True))[len(bare) // 2]  # some steps read many numbers
    assert more == (0 if kind == "fused" else 1)


CAPTURED = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Linear(8, 1).cuda()
optimizer = torch.optim.Adam(model.parameters(), capturable=True)
x = torch.randn(16, 8, device="cuda")
def step():
    optimizer.zero_grad(set_to_none=True)
    model(x).square().mean().backward()
    optimizer.step()
stream = torch.cuda.Stream()
with torch.cuda.stream(stream):
    for _ in range(3): step()
torch.cuda.current_stream().wait_stream(stream)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph): step()
for _ in range(5): graph.replay()
print(model.weight.isfinite().all().item())
"""


def test_a_step_in_a_cuda_graph_is_not_disturbed_and_told_not_to_be_guarded(tmp_path):
    (tmp_path / "train.py").write_text(CAPTURED)
    if run(tmp_path, "train.py").returncode or watched(tmp_path, "train.py").returncode:
        pytest.skip("such a graph cannot be captured here, or not while it is watched")
    ended = watched(tmp_path, "--guard", "train.py")
    assert (ended.stdout, ended.returncode) == ("True\n", 0), ended.stderr[-2000:]
    assert "steps of Adam that run inside a dispatch mode, a trace or a graph capture are not guarded" in ended.stderr
