"""Sampled steps of `surefoot run` on CUDA: few waits, no memory of an activation's size, and every number arrives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from surefoot.watch.sampling_budget import ALWAYS_ON_DEVICE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "benchmarks")]),
    "OMP_NUM_THREADS": "1",
}
STEPS = 12
MOST_WAITS = 20
"""Host syncs that one sampled step may add; without deferred numbers there were thousands."""
SCRIPT = f"""
import json
import warnings

import torch
from gpt import GPT, Shape

torch.manual_seed(0)
model = GPT(Shape(4, 256, 4, vocabulary=32_768, context=512)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=FUSED)
data = torch.randint(32_768, (16, 513), device="cuda")
waits = []
for step in range({STEPS}):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(data[:, :-1], data[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        torch.cuda.set_sync_debug_mode("default")
    waits.append([f"{{w.filename}}:{{w.lineno}}" for w in caught if "synchronizing" in str(w.message)])
torch.cuda.synchronize()
print(json.dumps({{"peak": torch.cuda.max_memory_allocated(), "waits": waits}}))
"""
ASSERT = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(10, 8), nn.Flatten(), nn.Linear(32, 3)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(10):
    ids = torch.randint(10, (16, 4), device="cuda")
    if step == 6:
        ids[0, 0] = 99
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(ids), ids[:, 0] % 3).backward()
    optimizer.step()
torch.cuda.synchronize()
"""


def run(folder, script, watched, environment=ENVIRONMENT):
    (folder / "train.py").write_text(script)
    prefix = ["-m", "surefoot", "run", "--out", "run"] if watched else []
    command = [sys.executable, *prefix, "train.py"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module", params=[True, False], ids=["fused", "foreach"])
def runs(request, tmp_path_factory):
    """Figures of the bare run and of the watched one, and the facts of the latter."""
    folder = tmp_path_factory.mktemp("looks")
    script = SCRIPT.replace("FUSED", str(request.param))
    bare, watched = run(folder, script, watched=False), run(folder, script, watched=True)
    assert bare.returncode == 0, bare.stderr[-2000:]
    assert watched.returncode == 0, watched.stderr[-2000:]
    assert "stopped watching" not in watched.stderr
    facts = json.loads((folder / "run" / "facts.json").read_text())
    return json.loads(bare.stdout), json.loads(watched.stdout), facts


def test_a_sampled_step_waits_for_the_device_a_few_times_only(runs):
    bare, watched, facts = runs
    looked_at = {look["step"] for look in facts["sampled_steps"]}
    for step in range(2, STEPS):  # the first steps compile kernels; step 1 asks for an extra backward
        added = len(watched["waits"][step]) - len(bare["waits"][step])
        assert added < MOST_WAITS, (step, step in looked_at, sorted(set(watched["waits"][step])))


def test_sampled_steps_add_at_most_one_percent_to_the_peak_of_memory(runs):
    bare, watched, _ = runs
    assert watched["peak"] <= 1.01 * bare["peak"]


def test_every_number_of_a_sampled_step_arrives(runs):
    _, _, facts = runs
    assert facts["problems"] == {}
    assert [look["step"] for look in facts["sampled_steps"][:ALWAYS_ON_DEVICE]] == list(range(ALWAYS_ON_DEVICE))
    look = facts["sampled_steps"][2]
    assert look["host_seconds"] > 0
    assert all(isinstance(call["out_std"], float) for call in look["notes"]["layers"])
    (loss,) = look["notes"]["losses"]
    assert loss["accuracy"] >= 0
    assert loss["valid"] == loss["targets"] == 16 * 512
    rows = look["steps"][0]["rows"]
    assert all(row["update"] > 0 and row["grad"] > 0 and row["age"] == look["step"] for row in rows)
    assert all(parameter["changed"] > 0 and parameter["last"]["norm"] > 0 for parameter in facts["parameters"])


def test_looks_use_no_operation_that_the_deterministic_mode_refuses(tmp_path):
    script = "import torch\ntorch.use_deterministic_algorithms(True)\n" + SCRIPT.replace("FUSED", "True")
    environment = {**ENVIRONMENT, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    ended = run(tmp_path, script, watched=True, environment=environment)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert json.loads((tmp_path / "run" / "facts.json").read_text())["problems"] == {}


def test_looks_before_a_device_side_assert_are_kept(tmp_path):
    ended = run(tmp_path, ASSERT, watched=True)
    assert ended.returncode == 1
    assert "Traceback" in ended.stderr
    facts = json.loads((tmp_path / "run" / "facts.json").read_text())
    assert [look["step"] for look in facts["sampled_steps"]][:ALWAYS_ON_DEVICE] == list(range(ALWAYS_ON_DEVICE))
    assert facts["crash"]["type"] in ("AcceleratorError", "RuntimeError")


BY_HAND = """
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
source = torch.randint(17, (300, 16), device="cuda")
embed, out = nn.Embedding(17, 16).cuda(), nn.Linear(16, 17).cuda()
model = nn.Sequential(embed, out, nn.Flatten(0, 1))
for at in range(0, 240, 12):
    model.zero_grad()
    F.nll_loss(F.log_softmax(model(source[at : at + 12]), 1), source[at + 1 : at + 13].reshape(-1)).backward()
    for p in model.parameters():
        p.data.add_(p.grad, alpha=-0.5)
"""


def test_a_loop_without_an_optimizer_has_its_moves_and_its_causality(tmp_path):
    ended = run(tmp_path, BY_HAND, watched=True)
    assert ended.returncode == 0, ended.stderr[-2000:]
    facts = json.loads((tmp_path / "run" / "facts.json").read_text())
    assert facts["problems"] == {}
    assert all(move > 0 for parameter in facts["parameters"] for move in parameter["moves"])
    assert any(root.get("causality") for look in facts["sampled_steps"] for root in look["roots"])
