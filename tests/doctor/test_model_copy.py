"""A copy trains like the original and leaves it alone; a look records a pass or its error."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from surefoot.doctor.loss_of_batch import loss_taker
from surefoot.doctor.model_copy import ModelCopy, first_tensor, is_warming_up, peak_rate, rms, scalar

BATCH = (torch.ones(4, 3), torch.zeros(4, 1))
WAY = loss_taker(lambda model, batch: F.mse_loss(model(batch[0]), batch[1]))


def parts():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.5), nn.Linear(5, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_the_copied_optimizer_steps_the_copied_parameters():
    model, optimizer = parts()
    before = [p.detach().clone() for p in model.parameters()]
    copy = ModelCopy(model, None, optimizer, WAY)
    first = copy.step(BATCH)
    assert copy.step(BATCH) != first or math.isnan(first)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    assert {id(p) for p in copy.parameters} == {id(p) for p in copy.model.parameters()}
    assert copy.gradient_norm() == pytest.approx(
        math.sqrt(sum(float(p.grad.square().sum()) for p in copy.parameters)), rel=1e-5
    )


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
def test_an_optimizer_that_needs_a_closure_is_given_one():
    model, _ = parts()
    copy = ModelCopy(model, None, torch.optim.LBFGS(model.parameters(), max_iter=3), WAY).without_dropout()
    first = copy.step(BATCH)
    assert copy.step(BATCH) < first


def test_a_rate_under_a_warm_up_counts_as_what_it_warms_up_to():
    assert peak_rate({"lr": 1e-5, "initial_lr": 1e-2}) == 1e-2
    model, optimizer = parts()
    assert not is_warming_up(optimizer)
    copy = ModelCopy(model, None, optimizer, WAY)
    copy.scale_rates(10)
    assert copy.optimizer.param_groups[0]["lr"] == pytest.approx(1.0)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_look_sees_the_first_output_that_is_not_finite():
    model, _ = parts()
    look = ModelCopy(model, None, None, WAY).look(BATCH)
    assert look.error is None
    assert math.isfinite(look.value)
    assert look.facts is not None
    with torch.no_grad():
        model[2].weight.fill_(torch.nan)
    assert ModelCopy(model, None, None, WAY).look(BATCH).first_nonfinite == "2"


def test_an_error_is_kept():
    model, _ = parts()
    look = ModelCopy(model, None, None, WAY).look((torch.ones(4, 7), BATCH[1]))
    assert isinstance(look.error, RuntimeError)
    assert math.isnan(look.value)


def test_a_loss_is_one_number():
    assert scalar((torch.ones(1, 1), "more")).dim() == 0
    assert float(scalar({"loss": torch.tensor(2.0)})) == 2.0
    with pytest.raises(ValueError, match="one number"):
        scalar(torch.ones(2))
    with pytest.raises(TypeError, match="must be a tensor"):
        scalar(3.0)


def test_small_helpers():
    assert first_tensor({"ids": torch.ones(2, dtype=torch.int64), "x": torch.ones(3)}).tolist() == [1, 1, 1]
    assert first_tensor("text") is None
    assert rms(torch.tensor([3.0, -3.0])) == 3.0
