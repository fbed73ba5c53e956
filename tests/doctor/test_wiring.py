"""Step 4: parameters, from the loss to the optimizer; and what looks like a fault and is none."""

import torch
import torch.nn.functional as F
from torch import nn

from doctor_probing import context_of, only
from surefoot.doctor.wiring import check_wiring

X, Y = torch.linspace(-1, 1, 64).reshape(16, 4), torch.arange(16) % 3


def checks(model, optimizer=None, loss_of=None):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    return check_wiring(context_of(model, [(X, Y)], nn.CrossEntropyLoss(), optimizer, loss_of=loss_of))


class TwoHeads(nn.Module):
    """The output of the second head goes nowhere, as a pooler that a task does not use."""

    def __init__(self):
        super().__init__()
        self.body, self.head, self.pooler = nn.Linear(4, 64), nn.Linear(64, 3), nn.Linear(64, 2)

    def forward(self, x):
        hidden = torch.tanh(self.body(x))
        self.pooler(hidden)
        return self.head(hidden)


def test_a_head_whose_output_is_not_used_is_no_cut_graph():
    assert only(checks(TwoHeads()), "gradient reaches").cause is None


def penalised(model, batch):
    """A gradient penalty: the loss depends on a leaf that nobody trains."""
    x = batch[0].clone().requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return F.cross_entropy(out, batch[1]) + slope.square().mean()


def test_an_input_that_a_gradient_penalty_differentiates_is_no_parameter():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    assert only(checks(model, loss_of=penalised), "registered").status == "pass"


class Frozen(nn.Linear):
    def forward(self, x):
        return super().forward(x).detach().requires_grad_()


def test_what_is_cut_off_is_named():
    model = nn.Sequential(nn.Linear(4, 8), Frozen(8, 8), nn.Linear(8, 3))
    assert only(checks(model), "gradient reaches").cause == "optim.detached-graph"
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    found = checks(model, torch.optim.SGD(model[1].parameters(), lr=0.1))
    assert only(found, "in the optimizer").cause == "optim.parameters-missing"


def test_a_state_of_another_shape_or_another_scale_is_named():
    model = nn.Linear(4, 3)
    adam = torch.optim.Adam(model.parameters())
    model(X).sum().backward()
    adam.step()
    assert only(checks(model, adam), "optimizer state").status == "pass"
    for state in adam.state.values():
        state["exp_avg_sq"].mul_(1e-12)
    assert only(checks(model, adam), "optimizer state").cause == "optim.stale-state"


def test_modules_that_never_run_are_a_warning_without_a_cause():
    model = nn.Sequential(nn.Linear(4, 3))
    model[0].spare = nn.Linear(40, 40)
    check = only(checks(model), "gradient reaches")
    assert (check.status, check.cause) == ("warn", None)
    assert "0.spare.weight" in check.summary
