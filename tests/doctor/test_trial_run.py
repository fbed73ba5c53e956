"""After the preflight, a copy trains until a detector raises an alarm."""

import copy

import pytest
import torch
from torch import nn

from doctor_probing import context_of
from surefoot.doctor.examine import examine
from surefoot.doctor.trial_run import check_trial_run


def built(lr=0.05, bad=None, optimizer=torch.optim.SGD):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))
    x = torch.randn(256, 6)
    y = x.sum(1, keepdim=True)
    batches = list(zip(x.split(32), y.split(32), strict=True))
    if bad is not None:
        batches[bad] = (batches[bad][0] * torch.inf, batches[bad][1])
    return model, batches, nn.MSELoss(), optimizer(model.parameters(), lr=lr)


def check(num_steps=60, clip=None, **settings):
    model, batches, loss_fn, optimizer = built(**settings)
    before = copy.deepcopy(model.state_dict())
    context = context_of(model, batches, loss_fn, optimizer, seconds=60, clip=clip)
    (found,) = check_trial_run(context, num_steps)
    assert all(torch.equal(one, other) for one, other in zip(before.values(), model.state_dict().values(), strict=True))
    return found


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.LBFGS])
def test_a_run_that_goes_well_passes_with_its_losses(optimizer):
    found = check(num_steps=20, optimizer=optimizer)
    assert (found.status, found.step, found.number) == ("pass", 11, 20)
    assert found.summary.startswith("the loss goes from ")


def test_the_step_and_the_place_of_the_first_alarm_are_named():
    found = check(bad=5)
    assert (found.status, found.number) == ("fail", 5)
    assert found.summary.startswith("at step 5 of 60: nonfinite: ")
    assert "weight" in found.summary or "bias" in found.summary


def test_a_rate_that_is_far_too_high_ends_it():
    found = check(lr=1e3)
    assert found.status == "fail"
    assert found.number < 59
    assert found.fix


def test_it_is_run_on_request_only():
    model, batches, loss_fn, optimizer = built()
    plain = examine(model, batches, loss_fn, optimizer, seconds=0.2)
    assert max(each.step for each in plain.checks) == 10
    asked = examine(model, batches, loss_fn, optimizer, seconds=0.2, num_steps=3)
    assert asked["trial run"].step == 11
    with pytest.raises(ValueError, match="`num_steps` must be a whole number, and not negative; got -1"):
        examine(model, batches, loss_fn, optimizer, num_steps=-1)


def test_gradients_are_judged_as_they_were_before_clipping():
    found = check(num_steps=60, clip=1e-3, bad=5)
    assert found.status == "fail"
    assert "at step 5 " in found.summary
