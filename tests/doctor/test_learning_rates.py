"""Step 5: the user's rate is tried against a tenth and ten times of it."""

from dataclasses import replace

import torch
from torch import nn

from doctor_probing import context_of
from surefoot.doctor.learning_rates import check_rates
from surefoot.record.facts import RateProbe


def check(lr, make=torch.optim.SGD, seconds=60.0):
    torch.manual_seed(0)
    x = torch.randn(64, 4)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
    batches = [(part, (part[:, 0] > 0).long() + (part[:, 1] > 0).long()) for part in x.split(16)]
    context = context_of(model, batches, nn.CrossEntropyLoss(), make(model.parameters(), lr=lr), seconds=seconds)
    (found,) = check_rates(context)
    return found, context


def test_a_common_rate_passes_and_norms_are_kept_for_step_7():
    found, context = check(0.1)
    assert found.status == "pass"
    assert len(context.gradient_norms) == 60


def test_rates_that_are_zero_tiny_or_huge_are_named():
    assert check(0.0)[0].cause == "optim.no-update"
    assert check(1e-7)[0].cause == "lr.too-low"
    assert check(3.0, torch.optim.Adam)[0].cause == "lr.too-high"


def test_a_short_budget_judges_nothing():
    assert check(0.1, seconds=1e-6)[0].status == "skipped"


def test_a_probe_that_blew_up_fell_by_minus_infinity():
    probe = RateProbe(factor=1.0, start=2.0, end=1.0, peak=2.0, steps=10, update_ratio=1e-3)
    assert probe.fall == 0.5
    assert replace(probe, end=float("nan")).fall == -float("inf")
