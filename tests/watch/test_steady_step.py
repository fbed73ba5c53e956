"""`surefoot run` stands on the guard: a steady step goes through the same stages as a guarded one."""

import json

TRACED = """
import json, sys
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters())
x = torch.randn(16, 8)

def step(scale=1.0):
    optimizer.zero_grad()
    (model(x).square().mean() * scale).backward()
    optimizer.step()

for _ in range(90):
    step()
seen = set()

def profile(frame, event, argument):
    path = frame.f_code.co_filename
    if "surefoot" in path:
        seen.add(path.replace("\\\\", "/").rpartition("/surefoot/")[2])

sys.setprofile(profile)
step()
sys.setprofile(None)
open("seen.json", "w").write(json.dumps(sorted(seen)))
"""

STAGES = {"observe", "detect", "act", "guard"}
GUARD = {
    "detect/step_rules.py",
    "guard/attach.py",
    "guard/guarded_optimizer.py",
    "guard/log_rows.py",
    "guard/step_decision.py",
    "guard/step_results.py",
    "observe/tensors.py",
}


def test_a_steady_step_is_measured_and_decided_by_the_guard(watch):
    run = watch(TRACED)
    seen = set(json.loads((run.folder / "seen.json").read_text()))
    assert seen >= GUARD, GUARD - seen
    assert {path.partition("/")[0] for path in seen} >= STAGES


def test_the_guard_skips_a_step_whose_loss_is_not_finite_although_its_gradients_are(watch):
    run = watch.guarded(
        """
        import torch

        weight = torch.ones(3, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for step in range(12):
            optimizer.zero_grad()
            loss = weight.square().sum() + (torch.tensor(float("inf")) if step == 5 else 0.0)
            before = weight.detach().clone()
            loss.backward()
            assert weight.grad.isfinite().all()
            optimizer.step()
            assert torch.equal(before, weight) == (step == 5), step
        """
    )
    assert run.exit_code == 0, run.errors
    facts, _ = run.loaded
    assert facts.guard is not None
    assert facts.guard.skipped == 1
    assert facts.optimizers[0].series.skipped[5] is True
    assert "skipped 1 (step 5); the loss" in run.errors


def test_an_optimizer_without_a_learning_rate_is_watched_like_any_other(watch):
    run = watch(
        """
        import torch

        class Relative(torch.optim.Optimizer):
            def __init__(self, parameters):
                super().__init__(parameters, {"lr": None})

            @torch.no_grad()
            def step(self, closure=None):
                for group in self.param_groups:
                    for parameter in group["params"]:
                        parameter.sub_(parameter.grad, alpha=0.01)

        model = torch.nn.Linear(4, 1)
        optimizer = Relative(model.parameters())
        other = torch.optim.Adam(torch.nn.Linear(4, 1).parameters(), lr=torch.tensor(0.5))
        for step in range(40):
            optimizer.zero_grad()
            model(torch.ones(8, 4)).square().mean().backward()
            optimizer.step()
        """
    )
    facts = run.loaded[0]
    watched, other = facts.optimizers
    assert (facts.problems, watched.steps) == ({}, 40)
    assert watched.series.lr == [None] * 40
    assert None not in watched.series.grad_norm
    assert other.first_group.lr == 0.5


ON_A_DEVICE = """
import statistics, sys
import torch
from torch import nn
from surefoot.core import device, device_copies
from surefoot.watch import indexed_calls

class Event:  # the CPU as a device with streams, whose work is done at once
    def record(self, stream): pass
    def query(self): return True
    def synchronize(self): pass

class Device:
    Event = Event
    current_stream = synchronize = staticmethod(lambda device=None: None)

def memory(size, dtype, device):
    return torch.empty(size, dtype=dtype)

device._has_streams["cpu"], device._module_of = True, lambda device: Device
device_copies.permanent_host_memory = indexed_calls.permanent_host_memory = memory

torch.manual_seed(0)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places, self.head = nn.Embedding(50, 8), nn.Embedding(6, 8), nn.Linear(8, 50)

    def forward(self, ids):
        return self.head(self.tokens(ids) + self.places(torch.arange(6))).mean(1)

model = Model()
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
data, counts = torch.randint(50, (32, 7)), []

def step(number):
    ids, labels = data[number % 4 * 8 :][:8].split([6, 1], 1)
    loss = nn.functional.cross_entropy(model(ids), labels[:, 0])
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()

def count_calls(frame, event, argument):
    if event == "call":
        inside.append("surefoot" in frame.f_code.co_filename or (bool(inside) and inside[-1]))
        counts[-1] += inside[-1]
    elif event == "return" and inside:
        inside.pop()
    elif event == "c_call":
        counts[-1] += bool(inside) and inside[-1]

for number in range(330):
    step(number)
for number in range(40):
    inside = []
    counts.append(0)
    sys.setprofile(count_calls)
    step(number)
    sys.setprofile(None)
print(statistics.median(counts))
"""
MOST_CALLS = 560
"""The largest number of function calls, Python's and C's, that surefoot may add to a steady step of that script."""


def test_a_steady_step_on_a_device_costs_few_calls_on_the_host(watch):
    run = watch(ON_A_DEVICE)
    assert run.exit_code == 0, run.errors
    assert run.loaded[0].problems == {}
    assert run.loaded[0].steps == 370
    assert float(run.output) <= MOST_CALLS
