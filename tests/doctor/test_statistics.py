"""Step 4: scales, units and gradients of one pass."""

import pytest
import torch
from torch import nn

from doctor_probing import context_of, only
from surefoot.doctor.statistics import check_statistics


def checks(model, scale=1.0, target=None, loss_fn=None):
    torch.manual_seed(0)
    x = scale * torch.randn(32, 4)
    y = torch.arange(32) % 3 if target is None else target
    return check_statistics(
        context_of(model, [(x, y)], loss_fn or nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1))
    )


def test_a_sound_model_passes_everything():
    found = checks(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)))
    does_not_apply = {"target scale": "no real-valued targets", "saturation": "no sigmoid or tanh was seen"}
    assert {check.name: check.summary for check in found if check.status != "pass"} == does_not_apply
    assert {check.status for check in found} == {"pass", "skipped"}


@pytest.mark.parametrize(("scale", "status"), [(1.0, "pass"), (30.0, "warn"), (1000.0, "fail"), (1e-5, "warn")])
def test_inputs_far_from_unit_scale(scale, status):
    check = only(checks(nn.Linear(4, 3), scale), "input scale")
    assert check.status == status
    assert check.cause == (None if status == "pass" else "data.unscaled-input")


def test_large_targets_of_a_regression():
    check = only(checks(nn.Linear(4, 1), target=torch.full((32, 1), 1e4), loss_fn=nn.MSELoss()), "target scale")
    assert check.status == "warn"


def test_silent_and_saturated_units():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    with torch.no_grad():
        model[0].bias.fill_(-100.0)
    assert only(checks(model), "silent units").cause == "model.dead-units"
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    with torch.no_grad():
        model[0].bias.fill_(100.0)
    assert only(checks(model), "saturation").cause == "model.saturated-units"


def test_a_gradient_that_is_not_finite_names_its_operation():
    class Root(nn.Linear):
        def forward(self, x):
            out = super().forward(x)
            return out + (out - out).sqrt()

    check = only(checks(Root(4, 3)), "gradients")
    assert check.cause == "loss.undefined-op"
    assert "The backward pass of sqrt" in check.summary
