"""Step 7: the limit is compared with the norms that were seen."""

import math

import pytest
import torch
from torch import nn

from doctor_probing import context_of
from surefoot.doctor.clipping import check_clipping
from surefoot.record.facts import OptimizerFacts, RunFacts, StepSeries


def check(norms, clip=None):
    model = nn.Linear(2, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    context = context_of(model, [(torch.ones(4, 2), torch.zeros(4, 1))], nn.MSELoss(), sgd, clip=clip)
    columns = {"clip_norm": norms, "clip_limit": [clip] * len(norms)} if clip else {}
    series = StepSeries(step=list(range(len(norms))), grad_norm=norms, loss=[1.0] * len(norms), **columns)
    context.rehearsal = RunFacts(
        steps=len(norms), optimizers=[OptimizerFacts(number=0, type="SGD", steps=len(norms), series=series)]
    )
    (found,) = check_clipping(context)
    return found


@pytest.mark.parametrize(
    ("norms", "clip", "status", "cause"),
    [
        ([1.0] * 20, None, "pass", None),
        ([1.0] * 20, 2.0, "pass", None),
        ([30.0] * 20, 1.0, "warn", "clip.saturated"),
        ([3.0] * 20, 1.0, "pass", None),
        ([*[1.0] * 20, 500.0], None, "warn", "model.exploding-gradient"),
        ([1.0] * 3, None, "skipped", None),
        ([math.nan] * 20, None, "skipped", None),
    ],
)
def test_norms_against_the_limit(norms, clip, status, cause):
    found = check(norms, clip)
    assert (found.status, found.cause) == (status, cause)
