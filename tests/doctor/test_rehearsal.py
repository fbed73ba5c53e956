"""The rehearsal is a run like any other: recorded by the watcher, judged by the rules, on a copy."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from doctor_probing import context_of
from surefoot.doctor.rehearsal import STEPS, rehearse
from surefoot.record.facts import RunFacts


def batches(count=4):
    torch.manual_seed(0)
    return [(torch.randn(8, 4), torch.arange(8) % 3) for _ in range(count)]


def rehearsed(model, make=torch.optim.SGD, loss_of=None, **settings):
    optimizer = make(model.parameters(), lr=0.1) if make is not None else None
    return rehearse(context_of(model, batches(), nn.CrossEntropyLoss(), optimizer, loss_of=loss_of, **settings))


def test_a_copy_is_trained_and_every_step_is_recorded():
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    before = [p.detach().clone() for p in model.parameters()]
    facts = rehearsed(model)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    assert facts.steps == STEPS
    assert facts.problems == {}
    (optimizer,) = facts.optimizers
    assert (optimizer.type, optimizer.site) == ("SGD", "")
    assert len(optimizer.series.grad_norm) == STEPS
    assert [held.name for held in facts.parameters] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert all(held.changed and held.in_graph for held in facts.parameters)
    assert RunFacts.from_json(facts.to_json()).steps == STEPS


def test_the_limit_of_clipping_is_put_beside_the_norms():
    series = rehearsed(nn.Linear(4, 3), clip=0.5).optimizers[0].series
    assert set(series.clip_limit) == {0.5}
    assert series.clip_norm[0] == series.grad_norm[0]


def test_an_error_ends_it_as_it_ends_a_script():
    class Carries(nn.Linear):
        state = 0

        def forward(self, x):
            out = super().forward(x) + self.state
            self.state = out.mean()
            return out

    facts = rehearsed(Carries(4, 3))
    assert facts.steps == 1
    assert "second time" in facts.crash.message


def test_without_an_optimizer_adam_stands_in():
    facts = rehearsed(nn.Linear(4, 3), make=None)
    assert facts.optimizers[0].type == "Adam"
    frozen = nn.Linear(4, 3).requires_grad_(False)
    assert "does not require grad" in rehearsed(frozen, make=None).crash.message


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
def test_a_closure_is_followed_too():
    facts = rehearsed(nn.Linear(4, 3), make=torch.optim.LBFGS)
    assert facts.steps == STEPS
    assert facts.optimizers[0].series.closure[0] > 1


def test_hooks_and_modes_are_gone_afterwards():
    rehearsed(nn.Linear(4, 3))
    assert not nn.modules.module._global_forward_hooks
    assert not nn.modules.module._global_forward_pre_hooks
    assert torch._C._len_torch_function_stack() == 0
    assert float(F.relu(torch.ones(()))) == 1.0
