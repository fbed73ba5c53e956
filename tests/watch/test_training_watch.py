"""A training that is watched from inside: what is seen of it, what is put back, and when nothing is watched."""

from __future__ import annotations

import json

import pytest
import running

import forked

START = """
import json, sys, types
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import optimizer as module_of_optimizers
from torch.utils.data import DataLoader, TensorDataset
from surefoot.watch import patches
from surefoot.watch.training_watch import TrainingWatch

torch.manual_seed(0)
x = torch.randn(256, 8)
y = x[:, :3].argmax(1)
model = nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 30)

def train():
    for epoch in range(2):
        for rows, labels in DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True):
            optimizer.zero_grad()
            F.cross_entropy(model(rows).softmax(1), labels).backward()
            optimizer.step()
            schedule.step()

def state():
    owners = [torch, torch.autograd, torch.Tensor, nn.Module, F, torch.optim.Optimizer, torch.serialization,
              torch.nn.utils, torch.no_grad, DataLoader, torch.amp.GradScaler, torch.utils.data.dataloader]
    codes = {(str(owner), name): value.__code__ for owner in owners for name, value in vars(owner).items()
             if isinstance(value, types.FunctionType)}
    hooks = [len(getattr(module_of_optimizers, f"_global_optimizer_{when}_hooks")) for when in ("pre", "post")]
    ours = {(name, key): id(value) for name, module in sys.modules.items() if name.startswith("surefoot.")
            for key, value in vars(module).items() if isinstance(value, types.ModuleType)}
    return codes, hooks, ours
"""


def test_what_was_made_before_is_seen_and_everything_is_put_back():
    program = """
random = torch.get_rng_state()
before = state()
for training in range(2):
    watch = TrainingWatch.begin([model])
    assert state()[0] != before[0]
    watch.add([optimizer], [schedule], began_at=7)
    assert torch.equal(torch.get_rng_state(), random)
    train()
    facts = watch.end()
    random = torch.get_rng_state()
    after = state()
    assert after[:2] == before[:2]
    assert {key: after[2][key] for key in before[2]} == before[2]
    assert patches.installed == [] and watch.end() is None
    assert facts.problems == {}, facts.problems
    assert (facts.scope, facts.began_at, facts.seeds, facts.steps) == ("training", 7, None, 32)
    assert len(facts.sampled_steps) >= 4 and facts.optimizers[0].series.loss[0] is not None
    assert {each.op for step in facts.sampled_steps for each in step.calls.losses} == {"cross_entropy"}
    assert facts.schedulers[0].steps > 30 and facts.loaders[0].shuffles and len(facts.batches) == 32
"""
    ended = forked.run(["-c", START + program])
    assert ended.returncode == 0, ended.stderr


def test_nothing_is_watched_where_that_could_change_the_run():
    program = """
import logging
logging.basicConfig(level=logging.INFO)
compiled = torch.compile(model, backend="eager")
assert TrainingWatch.begin([compiled]) is None
by_method = nn.Linear(8, 8)
by_method.forward = torch.compile(by_method.forward, backend="eager")
assert TrainingWatch.begin([model, by_method]) is None
compiled(x)
assert TrainingWatch.begin([model]) is None  # the compiler has read its code
torch._dynamo.reset()
own = torch.Tensor.backward
torch.Tensor.backward = lambda *args, **kwargs: own(*args, **kwargs)
assert TrainingWatch.begin([model]) is None
torch.Tensor.backward = own
own = nn.Module.named_modules  # called by `named_parameters`, which surefoot calls
nn.Module.named_modules = lambda self, *args, **kwargs: own(self, *args, **kwargs)
assert TrainingWatch.begin([model]) is None
nn.Module.named_modules = own
nn.Module.smart_apply = lambda module, function: module.apply(function)  # an addition of a library
assert TrainingWatch.begin([model]) is not None
assert TrainingWatch.begin([model]) is None  # one at a time
"""
    ended = forked.run(["-c", START + program], imported=forked.COMPILER)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("compiled with `torch.compile`") == 3
    assert "Tensor.backward of torch was replaced" in ended.stderr
    assert "Module.named_modules of torch was replaced" in ended.stderr


LIBRARY = """
import torch

graphs = []

def backend(graph, inputs):
    graphs.append(graph.code)
    return graph

@torch.compile(backend=backend)
def half(tensor):
    return tensor / 2

@torch.library.custom_op("decorating::mean_size", mutates_args=())
def mean_size(tensor: torch.Tensor) -> torch.Tensor:
    return 2 * half(tensor).abs().mean()

@torch.compile(backend=backend)
def scaled(tensor):
    factor = 1 + torch.nn.functional.softplus(tensor)
    torch._dynamo.graph_break()
    return torch.nn.functional.dropout(tensor, 0.1) / factor
"""
CALLED_LATER = """
import decorating

calls = 0

class Scaled(nn.Module):
    def forward(self, features):
        global calls
        calls += 1
        if not called or calls < 5:
            return features * 1.0
        size = decorating.mean_size(features.detach())  # called by the recorder, which stays until it returns
        return decorating.scaled(features) / (1 + size)

called = sys.argv[1] == "called"
model.insert(1, Scaled())
watch = TrainingWatch.begin([model]) if sys.argv[2] == "watched" else None
if watch is not None:
    watch.add([optimizer], [schedule])
train()
facts = watch and watch.end()
from torch._dynamo.utils import counters
print(json.dumps({
    "weights": [each.tolist() for each in model.parameters()],
    "graphs": decorating.graphs, "counters": {key: dict(counters[key]) for key in ("frames", "stats", "graph_break")},
    "compiled": facts and facts.compiled, "problems": facts and facts.problems,
    "recorded": facts and [step.step for step in facts.sampled_steps if step.operations],
}))
"""


def _with_library(tmp_path):
    """A folder of packages, one of which decorates functions on import."""
    folder = tmp_path / "site-packages"
    folder.mkdir(exist_ok=True)
    (folder / "decorating.py").write_text(LIBRARY)
    return str(folder)


def run_with_library(tmp_path, called, how):
    ended = forked.run(
        ["-c", f"import sys\nsys.path.insert(0, {_with_library(tmp_path)!r})\n" + START + CALLED_LATER, called, how],
        imported=forked.COMPILER,
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


def test_what_a_library_decorates_and_nobody_calls_leaves_the_probes_on(tmp_path):
    facts = run_with_library(tmp_path, "unused", "watched")
    assert [facts[key] for key in ("compiled", "graphs", "problems")] == [False, [], {}]
    assert len([step for step in facts["recorded"] if step > 5]) >= 2


def test_a_decorated_function_is_compiled_as_without_the_watch_when_the_training_calls_it(tmp_path):
    bare = run_with_library(tmp_path, "called", "bare")
    facts = run_with_library(tmp_path, "called", "watched")
    assert len(bare["graphs"]) == 3
    assert [facts[key] for key in ("compiled", "problems")] == [True, {}]
    assert facts["recorded"] == [0, 1, 2, 3, 4]
    for key in ("weights", "graphs", "counters"):
        assert facts[key] == bare[key], key


@pytest.mark.parametrize("called", ["unused", "called"])
def test_surefoot_run_also_waits_for_the_first_call(tmp_path, called):
    script = START.replace("from surefoot.watch", "# from surefoot.watch") + CALLED_LATER.partition("watch =")[0]
    script += "train()\nprint([each.sum().item() for each in model.parameters()], decorating.graphs)\n"
    (tmp_path / "train.py").write_text(script)
    path = {"PYTHONPATH": _with_library(tmp_path)}
    running.both(tmp_path, "train.py", called, environment=path, imported=forked.COMPILER)
    facts = json.loads((tmp_path / "run" / "facts.json").read_text())
    assert facts["compiled"] == (called == "called")
    recorded = [step["step"] for step in facts["sampled_steps"] if step.get("operations")]
    assert recorded[:5] == [0, 1, 2, 3, 4]
    assert (len(recorded) > 5) == (called == "unused")
