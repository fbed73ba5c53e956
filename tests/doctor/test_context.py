"""What checks share: fresh copies, batches on the device, steps within the budget."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from doctor_probing import context_of
from surefoot.doctor.checks import passed
from surefoot.doctor.context import PROBE_BATCHES, STEPS, rehearse
from surefoot.record.facts import AlikeRows, RunFacts


def context(seconds=2.0):
    torch.manual_seed(3)
    batches = [(torch.full((4, 2), float(i)), torch.zeros(4, 1)) for i in range(6)]
    model = nn.Linear(2, 1)
    return context_of(model, batches, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1), seconds=seconds)


def test_every_trial_starts_from_the_same_state_and_leaves_the_model_alone():
    shared = context()
    before = shared.model.weight.detach().clone()
    one, other = shared.trial(), shared.trial()
    assert one.step(shared.batch()) == other.step(shared.batch())
    assert torch.equal(one.model.weight, other.model.weight)
    assert torch.equal(shared.model.weight, before)
    assert shared.trial(own_optimizer=False).optimizer is None


def test_a_batch_is_a_copy():
    shared = context()
    shared.batch()[0].add_(1)
    assert float(shared.batches[0][0].sum()) == 0.0
    assert len(shared.batch(1, rows=2)[0]) == 2
    assert torch.equal(shared.batch(7)[0], shared.batch(1)[0])
    assert len(shared.probe_batches()) == PROBE_BATCHES


def test_at_least_two_steps_are_given_however_small_the_budget():
    assert len(list(context(seconds=1e-9).steps(100, 0.5))) == 2
    assert len(list(context(seconds=1e9).steps(100, 0.5))) == 100


def test_the_rules_judge_what_a_probe_measured():
    shared = context()
    shared.rehearsal = RunFacts()
    sound = passed(6, "units differ", "they do", 0, "different rows")
    assert shared.judged(("init.symmetric",), sound) is sound
    shared.measured(alike_rows=[AlikeRows(parameter="0.weight", updates=3, apart=0.0, moved=1.0)])
    found = shared.judged(("init.symmetric",), sound)
    assert (found.step, found.name, found.status, found.expected) == (6, "units differ", "fail", "different rows")
    assert "0.weight" in found.summary
    assert shared.judged(("init.too-large",), sound) is sound


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
