"""How much of a step is measured on a CPU."""

import json

import pytest
import torch
from torch import nn

from surefoot.observe.tensors import TensorMeter, total_norm
from surefoot.record.facts import NonFiniteGradientEvent
from surefoot.watch.measured_steps import FIRST_STEPS, healthy_norm


def model_with_gradients(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 30), nn.Tanh(), nn.Linear(30, 3)).to(dtype)
    model(torch.randn(5, 7, dtype=dtype)).square().sum().backward()
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_norm_of_a_healthy_step_is_to_the_bit_the_one_that_the_guard_measures(dtype):
    parameters = list(model_with_gradients(dtype).parameters())
    mixed = nn.Parameter(torch.ones(3))
    mixed.grad = torch.full((3,), 0.25)
    for chosen in (parameters, [*parameters, mixed]):
        optimizer = torch.optim.SGD(chosen, lr=0.1)
        statistics = TensorMeter().measure([each.grad for each in chosen])
        assert healthy_norm(optimizer) == float(total_norm(statistics.norm))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_a_gradient_that_is_not_finite_or_whose_square_overflows_is_measured_in_full(value):
    for place in range(4):
        model = model_with_gradients()
        list(model.parameters())[place].grad.view(-1)[-1] = value
        assert healthy_norm(torch.optim.SGD(model.parameters(), lr=0.1)) is None


def test_what_the_norm_does_not_tell_is_measured_in_full():
    model = model_with_gradients()
    optimizer = torch.optim.Adam(model.parameters())
    assert healthy_norm(optimizer) is not None
    optimizer.param_groups[0]["lr"] = float("nan")
    assert healthy_norm(optimizer) is None
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.found_inf = torch.zeros(1)
    assert healthy_norm(optimizer) is None
    del optimizer.found_inf
    table = nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    assert healthy_norm(torch.optim.SGD([*model.parameters(), *table.parameters()], lr=0.1)) is None
    optimizer.zero_grad()
    assert healthy_norm(optimizer) is None


LATE = """
import json, sys
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
x = torch.randn(64, 8)
norms, seen = [], {"healthy": set(), "bad": set()}
STEPS = FIRST + 60

def profile(frame, event, argument):
    path = frame.f_code.co_filename
    if "surefoot" in path:
        seen[kind].add(path.replace("\\\\\\\\", "/").rpartition("/surefoot/")[2])

for step in range(STEPS):
    loss = model(x[torch.randint(0, 64, (16,))]).square().mean()
    if step == STEPS - 1:  # the loss is finite, the last gradient of all is not
        model[2].bias.register_hook(lambda gradient: gradient * float("inf"))
    optimizer.zero_grad()
    loss.backward()
    norms.append(torch.nn.utils.get_total_norm([each.grad for each in model.parameters()]).item())
    kind = "bad" if step == STEPS - 1 else "healthy"
    if step >= STEPS - 5:
        sys.setprofile(profile)
    optimizer.step()
    sys.setprofile(None)
found = {kind: sorted(paths) for kind, paths in seen.items()}
open("seen.json", "w").write(json.dumps({"norms": norms, **found}))
""".replace("FIRST", str(FIRST_STEPS))

DECIDES = {"detect/step_rules.py", "guard/guarded_optimizer.py", "guard/step_decision.py"}


def test_a_late_step_goes_through_the_guard_only_if_it_is_not_healthy_and_then_in_time(watch):
    run = watch(LATE)
    told = json.loads((run.folder / "seen.json").read_text())
    facts = run.loaded[0]
    last = len(told["norms"]) - 1
    norms = facts.optimizers[0].series.grad_norm
    assert norms[:last] == told["norms"][:last]
    assert not DECIDES & set(told["healthy"])
    assert set(told["bad"]) >= DECIDES
    events = [event for event in facts.events if isinstance(event, NonFiniteGradientEvent)]
    assert [(event.step, event.parameters, event.loss_finite) for event in events] == [(last, ["2.bias"], True)]
    assert [int(place.name) for place in (run.folder / "run" / "incidents").iterdir()] == [last]
