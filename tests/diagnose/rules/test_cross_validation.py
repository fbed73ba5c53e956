"""A cross-validation is sound if every fold begins with new weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from watched import Nursery

FOLDS = """
import copy
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
x = torch.randn(400, 8)
y = x[:, :3].argmax(1)
folds = torch.randperm(400).view(4, 100)

def new():
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
    return model, torch.optim.Adam(model.parameters(), lr=1e-2)

def train(rows):
    for part in rows[torch.randperm(len(rows))].split(30):
        optimizer.zero_grad()
        F.cross_entropy(model(x[part]), y[part]).backward()
        optimizer.step()

def evaluate(rows):
    with torch.no_grad():
        print(F.cross_entropy(model(x[rows]), y[rows]).item())

model, optimizer = new()
start = copy.deepcopy(model.state_dict())
"""
LOOP = """
for fold in range(4):
    BEGIN
    held = folds[fold]
    kept = torch.cat([folds[other] for other in range(4) if other != fold])
    for epoch in range(5):
        train(kept)
        evaluate(held)
"""


@pytest.mark.parametrize("begin", ["pass", "optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)"])
def test_a_cross_validation_that_continues_one_model_leaks(watch: Nursery, begin: str) -> None:
    found = watch(FOLDS, LOOP.replace("BEGIN", begin)).first
    assert found.cause == "data.leakage"
    assert found.evidence["trained_before"] == 1
    assert found.fixes[0].startswith("Create the model and its optimizer anew")


ONE_SET = """
for epoch in range(20):
    train(folds[:3].flatten())
    evaluate(folds[3])
"""
TWO_TASKS = """
for task in (0, 1):
    for epoch in range(8):
        train(folds[2 * task : 2 * task + 2].flatten())
        for part in folds:
            evaluate(part)
"""
GROWING = """
for count in (1, 2, 3):
    for epoch in range(5):
        train(folds[:count].flatten())
        evaluate(folds[count])
"""
OTHER_SETS = """
for count in range(4):
    for epoch in range(5):
        train(folds[:2].flatten())
        evaluate(folds[2 + count % 2])
"""


@pytest.mark.parametrize(
    "loop",
    [
        LOOP.replace("BEGIN", "model, optimizer = new()"),
        LOOP.replace("BEGIN", "model.load_state_dict(start)"),
        LOOP.replace("BEGIN", "[part.reset_parameters() for part in model if hasattr(part, 'reset_parameters')]"),
        ONE_SET,
        TWO_TASKS,
        GROWING,
        OTHER_SETS,
    ],
    ids=["new", "loaded", "reset", "one set", "two tasks", "growing", "other sets"],
)
def test_rows_that_were_not_trained_on_by_these_weights_are_no_leak(watch: Nursery, loop: str) -> None:
    assert "data.leakage" not in watch(FOLDS, loop).causes
