"""A training that is watched from inside: what is seen of it, what is put back, and when nothing is watched."""

from __future__ import annotations

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
compiled = torch.compile(model)
assert TrainingWatch.begin([model]) is None
import torch._dynamo.eval_frame
torch._dynamo.eval_frame.cached_backends.clear()
assert TrainingWatch.begin([compiled]) is None
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
    ended = forked.run(["-c", START + program])
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("compiled with `torch.compile`") == 2
    assert "Tensor.backward of torch was replaced" in ended.stderr
    assert "Module.named_modules of torch was replaced" in ended.stderr
