"""What checks share: fresh copies, batches on the device, steps within the budget."""

import torch
from torch import nn

from doctor_probing import context_of
from surefoot.doctor.checks import passed
from surefoot.doctor.context import PROBE_BATCHES
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
