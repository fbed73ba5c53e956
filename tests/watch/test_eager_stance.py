"""`--eager-looks`: sampled steps see inside of compiled models, and the compiler's stance stays the script's own."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo import eval_frame

from surefoot.diagnose.engine import diagnose
from surefoot.record.facts import RunDescription
from surefoot.watch.eager_stance import EagerStance


@pytest.fixture
def stance():
    before = eval_frame._stance
    eager = EagerStance()
    yield eager
    eager.release()
    assert eval_frame._stance is before


def test_compiled_code_runs_eagerly_while_it_is_taken(stance):
    compiled = torch.compile(lambda x: x + torch.compiler.is_compiling(), backend="eager")
    assert compiled(torch.zeros(1)).item() == 1
    assert stance.take()
    assert compiled(torch.zeros(1)).item() == 0
    stance.release()
    with torch.compiler.set_stance("fail_on_recompile"):
        assert compiled(torch.zeros(1)).item() == 1


def test_the_very_stance_that_was_there_is_put_back(stance):
    with torch.compiler.set_stance("eager_on_recompile"):
        own = eval_frame._stance
        assert stance.take()
        assert eval_frame._stance.stance == "force_eager"
        assert not stance.take()  # once is enough
        stance.release()
        assert eval_frame._stance is own
        stance.release()
        assert eval_frame._stance is own


def test_it_is_not_taken_inside_of_compiled_code(stance):
    @torch.compile(backend="eager")
    def step(x):
        torch._dynamo.graph_break()
        taken.append(torch._dynamo.disable(stance.take)())
        return x + 1

    taken = []
    step(torch.zeros(1))
    assert taken == [False]


TRAIN = """
import atexit
import warnings

import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo import eval_frame
from torch._dynamo.backends.debugging import aot_eager

warnings.simplefilter("error")
torch.manual_seed(0)
compilations = []


def backend(graph, inputs):
    compilations.append(graph)
    return aot_eager(graph, inputs)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.head = nn.Linear(8, 32), nn.Linear(32, 3)

    def forward(self, features):
        return self.head(torch.relu(self.hidden(features)))


model = Net()
net = torch.compile(model, backend=backend, fullgraph=True)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
atexit.register(lambda: print("at exit:", eval_frame._stance.stance))
x = torch.randn(256, 8)
y = x[:, :3].argmax(1)
stances = []
for step in range(30):
    rows = torch.randint(len(x), (32,))
    if step == 5:
        with torch.compiler.set_stance("eager_on_recompile"):
            logits = net(x[rows])
        assert eval_frame._stance.stance == "default"
    elif step == 6:
        try:
            net(torch.randn(32, 9))
        except RuntimeError:
            logits = net(x[rows])
    else:
        logits = net(x[rows])
    stances.append(eval_frame._stance.stance)
    loss = F.cross_entropy(logits, y[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("stances:", sorted(set(stances)))
print("compiled:", len(compilations))
raise SystemExit(3)
"""


def test_sampled_steps_see_inside_of_a_compiled_model(watch):
    ran = watch.eagerly(TRAIN)
    assert ran.exit_code == 3
    assert ran.output.splitlines() == ["stances: ['default', 'force_eager']", "compiled: 1", "at exit: default"]
    assert ran.facts["eager_looks"]
    assert ran.facts["problems"] == {}
    seen = {each["step"]: each for each in ran.facts["sampled_steps"]}
    for step in (2, 3, 4):
        assert seen[step]["eager"]
        assert [each["op"] for each in seen[step]["notes"]["layers"]] == ["linear", "linear"]
        assert len(seen[step]["passes"]) == 1
    interrupted = seen[5]  # by a stance of the script's own
    assert not interrupted.get("eager")
    assert "operations" not in interrupted
    assert ran.loaded[1].eager_looks
    assert "ran eagerly" in diagnose(ran.loaded[0], RunDescription()).summary


def test_a_fault_inside_of_a_compiled_model_is_found(watch):
    logits = "self.head(torch.relu(self.hidden(features)))"
    inside = TRAIN.replace(f"return {logits}", f"return torch.softmax({logits}, -1)")
    ran = watch.eagerly(inside.replace("range(30)", "range(120)").replace("SystemExit(3)", "SystemExit(0)"))
    assert ran.first.cause == "loss.softmax-before-cross-entropy"


def test_without_the_option_compiled_code_is_what_runs(watch):
    ran = watch(TRAIN)
    assert ran.output.splitlines() == ["stances: ['default']", "compiled: 1", "at exit: default"]
    assert not any(each.get("eager") for each in ran.facts["sampled_steps"])
    assert all("operations" not in each for each in ran.facts["sampled_steps"])
    assert not ran.loaded[1].eager_looks
