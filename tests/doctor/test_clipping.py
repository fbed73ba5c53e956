"""Step 7: the limit is compared with the norms that were seen."""

import math

import pytest
import torch
from torch import nn

from doctor_probing import context_of
from surefoot.doctor.clipping import check_clipping


def check(norms, clip=None):
    context = context_of(nn.Linear(2, 1), [(torch.ones(4, 2), torch.zeros(4, 1))], nn.MSELoss(), clip=clip)
    context.gradient_norms = list(norms)
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
