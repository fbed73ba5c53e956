"""Step 8: bf16 autocast against float32, and weights that can move."""

import torch
from torch import nn

from doctor_probing import context_of, only
from surefoot.doctor.precision import check_precision

BATCH = [(torch.linspace(-1, 1, 32).reshape(8, 4), torch.arange(8) % 3)]


def checks(model, lr=0.1, optimizer=True):
    sgd = torch.optim.SGD(model.parameters(), lr=lr) if optimizer else None
    batch = [(BATCH[0][0].to(next(model.parameters()).dtype), BATCH[0][1])]
    return check_precision(context_of(model, batch, nn.CrossEntropyLoss(), sgd))


def test_a_plain_model_passes_both():
    assert [check.status for check in checks(nn.Linear(4, 3))] == ["pass", "pass"]


def test_updates_that_half_precision_swallows_are_named():
    model = nn.Linear(4, 3).bfloat16()
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.fill_(1.0)
    found = checks(model, lr=1e-4)
    assert only(found, "bf16 autocast").status == "skipped"
    assert only(found, "weights change").cause == "precision.low-precision-weights"


def test_a_step_that_moves_nothing_is_named():
    assert only(checks(nn.Linear(4, 3), lr=0.0), "weights change").cause == "optim.no-update"
    assert only(checks(nn.Linear(4, 3), optimizer=False), "weights change").status == "skipped"
