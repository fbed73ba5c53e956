"""Compiled models on CUDA: a bad row is named although its loss is known late, and looks may run eagerly."""

from __future__ import annotations

import pytest
import torch

from together import run_all, watched

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SCRIPT = """
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo import eval_frame
from torch._dynamo.utils import counters
from torch._inductor import config

config.deterministic = True  # otherwise the compiler times variants of a kernel, and they differ in their last bits
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


def ran_well(ended):
    assert ended.code == 0, ended.errors[-2000:]
    assert "stopped watching" not in ended.errors, ended.errors[-2000:]
    return ended


def facts_and_findings(ended):
    facts = ran_well(ended).written("facts.json")
    assert facts["problems"] == {}
    assert facts["steps"] == 400
    assert ended.out.split()[:2] == ["default", "1"]
    return facts, ended.written("findings.json")


GRAPHS = pytest.mark.parametrize("graphs", [False, True], ids=["compiled", "in graphs"])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Every process of this file, in a fresh interpreter: which steps are sampled depends on their cost."""
    programs = {}

    def add(key, text, arguments):
        folder = tmp_path_factory.mktemp("run")
        (folder / "train.py").write_text(text)
        programs[key] = (folder, arguments)

    for graphs in (False, True):
        words = ["graphs"] if graphs else []
        add(("healthy", graphs), SCRIPT, watched(*words))
        add(("nan", graphs), SCRIPT, watched("nan", *words))
        add(("eager", graphs), SCRIPT, watched("eager", *words, options=["--eager-looks"]))
    for fused in (False, True):
        text = CAPTURED.replace("FUSED", str(fused))
        add(("captured, bare", fused), text, ["train.py"])
        add(("captured", fused), text, watched())
    for i in range(2):
        add(("bare", i), SCRIPT, ["train.py"])
    return run_all(programs, fresh=True)


@GRAPHS
def test_a_bad_row_that_goes_into_a_compiled_model_is_data(runs, graphs):
    _, found = facts_and_findings(runs["nan", graphs])
    first = found["findings"][0]
    assert (first["cause"], first["step"]) == ("data.nonfinite-input", 300), found["findings"]
    assert first["evidence"]["argument"] == "features"


@GRAPHS
def test_a_healthy_compiled_run_is_healthy_and_waits_for_nothing(runs, graphs):
    _, found = facts_and_findings(runs["healthy", graphs])
    assert found["verdict"] == "healthy", found["findings"]


def test_a_compiled_run_has_the_bits_of_the_script_alone(runs):
    plain = [ran_well(runs["bare", i]).out for i in range(2)]
    assert plain[0] == plain[1], "the script alone has no bits of its own"
    assert ran_well(runs["healthy", False]).out == plain[0]


@GRAPHS
def test_eager_looks_see_inside_and_compile_nothing_again(runs, graphs):
    facts, found = facts_and_findings(runs["eager", graphs])
    assert found["verdict"] == "healthy", found["findings"]
    eager = [each for each in facts["sampled_steps"] if each.get("eager")]
    assert len(eager) >= 4
    assert all(len(each["notes"]["layers"]) == 7 for each in eager)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "foreach"])
def test_a_step_that_is_captured_as_a_whole_has_the_bits_of_the_script_alone(runs, fused):
    captured = ran_well(runs["captured", fused])
    assert captured.out == ran_well(runs["captured, bare", fused]).out
    assert "stopped watching" not in captured.errors, captured.errors
    assert captured.written("facts.json")["steps"] == 11  # Python does not run in the others
