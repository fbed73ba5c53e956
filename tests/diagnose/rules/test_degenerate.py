"""Batches with nothing to learn from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from watched import Nursery

START = """
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
x = torch.randn(600, 8)
y = x[:, :3].argmax(1)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
"""

LOOP = """
for step in range(100):
    rows = torch.randint(600, (40,))
    given, goals = x[rows].clone(), y[rows]
    change(step, given, goals)
    loss = F.cross_entropy(model(given), goals)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_inputs_that_are_all_zero_in_every_batch_are_named(watch: Nursery) -> None:
    run = watch(START, "def change(step, given, goals):\n    given.zero_()\n", LOOP)
    first = run.names_first("data.degenerate-batch", step=0, at="|model(given)", evidence={"constant", "batches"})
    assert first.severity == "error"


def test_one_batch_of_zeros_is_named_with_its_step(watch: Nursery) -> None:
    run = watch(START, "def change(step, given, goals):\n    given.mul_(step != 57)\n", LOOP)
    assert run.causes == ["data.degenerate-batch"]
    assert run.first.step == 57


def test_one_batch_with_one_label_is_named_with_its_step(watch: Nursery) -> None:
    run = watch(START, "def change(step, given, goals):\n    goals[:] = goals if step != 57 else 1\n", LOOP)
    assert "data.degenerate-batch" in run.causes
    assert run.finding("data.degenerate-batch").step == 57


@pytest.mark.parametrize(
    "loss", ["cross_entropy(model(given), goals)", "nll_loss(F.log_softmax(model(given), 1), goals)"]
)
def test_labels_that_are_all_equal_are_named(watch: Nursery, loss: str) -> None:
    loop = LOOP.replace("cross_entropy(model(given), goals)", loss)
    run = watch(START, "def change(step, given, goals):\n    goals.zero_()\n", loop)
    first = run.names_first("data.degenerate-batch", step=0, at="|F.", evidence={"label", "labels", "batches"})
    assert first.evidence["label"] == "0"


def test_a_contrastive_loss_whose_partner_is_always_column_0_is_fine(watch: Nursery) -> None:
    scores = """
    def scores(given):
        one, two = model(given), model(given + 0.1 * torch.randn_like(given))
        right, wrong = (one * two).sum(1, keepdim=True), one @ two.roll(1, 0).T[:, :20]
        return torch.cat([right, wrong], 1)
    """
    loop = LOOP.replace("cross_entropy(model(given), goals)", "cross_entropy(scores(given), goals)")
    run = watch(START, scores, "def change(step, given, goals):\n    goals.zero_()\n", loop)
    assert "data.degenerate-batch" not in run.causes


@pytest.mark.parametrize(("labels", "is_named"), [("goals.zero_()", True), ("goals.copy_(torch.arange(40))", False)])
def test_rows_that_are_all_to_match_the_first_row_are_named(watch: Nursery, labels: str, is_named: bool) -> None:
    loop = LOOP.replace(
        "model(given), goals)", "model(given) @ model(given + 0.1 * torch.randn_like(given)).T / 0.5, goals)"
    )
    run = watch(START, f"def change(step, given, goals):\n    {labels}\n", loop)
    assert ("data.degenerate-batch" in run.causes) == is_named


def test_ordinary_batches_are_not(watch: Nursery) -> None:
    assert watch(START, "def change(step, given, goals):\n    pass\n", LOOP).causes == []


WORKERS = """
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(0)
class Draws(Dataset):
    def __init__(self):
        self.generator = np.random.default_rng(0)
    def __len__(self):
        return 240
    def __getitem__(self, index):
        drawn = DRAWN
        return torch.tensor(drawn, dtype=torch.float32), torch.tensor(drawn.sum(), dtype=torch.float32)

model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for epoch in range(2):
    for x, y in DataLoader(Draws(), batch_size=20, num_workers=2):
        loss = nn.functional.mse_loss(model(x).squeeze(1), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


def test_workers_that_share_a_generator_are_named(watch: Nursery) -> None:
    run = watch(WORKERS.replace("DRAWN", "self.generator.normal(size=4)"))
    first = run.names_first("data.worker-seeds", step=0, at="|DataLoader(Draws", evidence={"workers", "same"})
    assert first.evidence["same"] == first.evidence["rounds"] == 6


def test_workers_with_seeds_of_their_own_are_not(watch: Nursery) -> None:
    assert watch(WORKERS.replace("DRAWN", "np.random.normal(size=4)")).causes == []


def test_labels_of_a_binary_loss_that_are_all_equal_are_named(watch: Nursery) -> None:
    loop = LOOP.replace("cross_entropy(model(given), goals)", "binary_cross_entropy(score(given), torch.ones(40))")
    score = "def change(step, given, goals): pass\ndef score(given): return model(given)[:, 0].sigmoid()\n"
    first = watch(START, score, loop).first
    assert (first.cause, first.evidence["label"]) == ("data.degenerate-batch", "1")
