"""A run is not healthy if what is evaluated never learns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from watched import Nursery

AVERAGED = """
import copy
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
x = torch.randn(300, 8)
y = x[:, :3].argmax(1)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
average = copy.deepcopy(model).requires_grad_(False)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

def evaluate(which, rows, labels=y):
    with torch.no_grad():
        print(F.cross_entropy(which(x[rows]), labels[rows]).item())

for step in range(300):
    rows = torch.randint(200, (32,))
    optimizer.zero_grad()
    F.cross_entropy(model(x[rows]), y[rows]).backward()
    optimizer.step()
    with torch.no_grad():
        for mean, p in zip(average.parameters(), model.parameters()):
            mean.lerp_(p, RATE)
    if step % 30 == 29:
        EVALUATE
"""
HELD_OUT = "evaluate(model, slice(200, 300))"


def test_an_average_that_never_follows_the_weights_is_not_healthy(watch: Nursery) -> None:
    diagnosis = watch(
        AVERAGED.replace("RATE", "1e-6").replace("EVALUATE", "evaluate(average, slice(200, 300))")
    ).diagnosis
    assert diagnosis.verdict == "unknown"
    assert "no better than that of the best constant answer" in diagnosis.reason


@pytest.mark.parametrize(
    ("rate", "evaluate"),
    [
        ("0.02", "evaluate(average, slice(200, 300))"),
        ("0.02", HELD_OUT),
        ("1e-6", HELD_OUT),
        ("1e-6", f"{HELD_OUT}; evaluate(average, slice(200, 300))"),
        ("0.02", f"{HELD_OUT}; evaluate(model, slice(200, 300), y.roll(7))"),
        ("0.02", "evaluate(model, slice(200, 300)) if step > 200 else None"),
    ],
    ids=["average", "model", "teacher", "both", "another task", "late"],
)
def test_an_evaluation_that_learns_is_healthy(watch: Nursery, rate: str, evaluate: str) -> None:
    assert watch(AVERAGED.replace("RATE", rate).replace("EVALUATE", evaluate)).diagnosis.verdict == "healthy"
