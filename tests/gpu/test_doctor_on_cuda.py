"""The rehearsal of the doctor on a GPU: recorded like a watched run, and nothing is changed."""

import pytest
import torch
from torch import nn

from surefoot.doctor.examine import examine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def setup(rate):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3)).cuda()
    x = torch.randn(256, 8)
    loader = list(zip(x.split(32), x[:, :3].argmax(1).split(32), strict=True))
    return model, loader, nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters(), lr=rate)


def test_a_healthy_setup_passes_and_stays_as_it_was():
    parts = setup(1e-2)
    before = [p.detach().clone() for p in parts[0].parameters()]
    examination = examine(*parts, seconds=120)
    assert examination.causes == ()
    assert "gradient norms have a median" in examination["clipping"].summary
    assert all(torch.equal(a, b) for a, b in zip(parts[0].parameters(), before, strict=True))


def test_a_rate_that_is_too_high_is_named():
    assert examine(*setup(10.0), seconds=120).causes[:1] == ("lr.too-high",)
