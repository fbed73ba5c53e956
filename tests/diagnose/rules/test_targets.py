"""Targets among the inputs, and targets out of reach."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from surefoot.diagnose.rules import targets

if TYPE_CHECKING:
    from watched import Nursery

TABLE = """
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
features = torch.randn(400, 5)
features[:, 1] = features[:, 1] * 40 + 100
y = features[:, :1] + 0.02 * features[:, 1:2] + 0.5 * torch.randn(400, 1)
TAKE
x = (x - x.mean(0)) / x.std(0)
model = nn.Sequential(nn.Linear(x.shape[1], 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(120):
    rows = torch.randint(300, (32,))
    optimizer.zero_grad()
    loss = F.mse_loss(model(x[rows]), y[rows])
    loss.backward()
    optimizer.step()
"""


def test_a_column_that_is_the_target_is_named(watch: Nursery) -> None:
    run = watch(TABLE.replace("TAKE", "x = torch.cat([features, 3 * y + 1], 1)"))
    assert run.causes == ["data.leakage"]
    assert run.first.evidence["features"] == [5]
    assert run.first.evidence["related_features"] >= 1


def test_features_that_are_related_to_the_target_are_no_leak(watch: Nursery) -> None:
    assert watch(TABLE.replace("TAKE", "x = features")).causes == []


def rows_of(count: int, width: int) -> list[list[float]]:
    draw = random.Random(0)
    return [[draw.gauss(0, 1) for _ in range(width)] for _ in range(count)]


def test_made_up_data_whose_target_is_one_of_unrelated_features_is_no_leak() -> None:
    rows = rows_of(200, 6)
    assert targets._holder(rows, [row[2] for row in rows]) is None


def test_a_column_with_one_value_per_class_holds_the_label() -> None:
    rows = rows_of(200, 4)
    labels = [float(row[0] > 0) for row in rows]
    holder = targets._holder([[*row, 7.0 - 2 * label] for row, label in zip(rows, labels, strict=True)], labels)
    assert holder is not None
    assert (holder.features, holder.rows) == ([4], 200)


@pytest.mark.parametrize("dropped", [0, 1])
def test_one_column_for_each_class_holds_the_label(dropped: int) -> None:
    rows = rows_of(200, 4)
    labels = [float((row[0] > -0.5) + (row[0] > 0.5)) for row in rows]
    encoded = [
        [*row, *[float(label == kind) for kind in range(3 - dropped)]] for row, label in zip(rows, labels, strict=True)
    ]
    holder = targets._holder(encoded, labels)
    assert holder is not None
    assert holder.features == list(range(4, 7 - dropped))


def test_a_column_that_tells_one_class_from_the_others_is_no_leak() -> None:
    rows = rows_of(200, 4)
    labels = [float((row[0] > -0.5) + (row[0] > 0.5)) for row in rows]
    assert targets._holder([[*row, float(label == 0)] for row, label in zip(rows, labels, strict=True)], labels) is None


def test_two_columns_that_hold_the_target_are_left_open() -> None:
    rows = rows_of(200, 4)
    goals = [row[0] + row[1] for row in rows]
    assert targets._holder([[*row, goal, -goal] for row, goal in zip(rows, goals, strict=True)], goals) is None


PRICES = """
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
x = torch.randn(256, 6)
y = BASE + SPREAD * (x[:, :1] + 0.3 * torch.randn(256, 1))
model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(150):
    rows = torch.randint(256, (32,))
    optimizer.zero_grad()
    loss = F.mse_loss(model(x[rows]), y[rows])
    loss.backward()
    optimizer.step()
"""


def test_prices_that_the_output_never_reaches_are_named(watch: Nursery) -> None:
    run = watch(PRICES.replace("BASE", "250000").replace("SPREAD", "60000"))
    run.names_first(
        "data.unscaled-target",
        step=0,
        at="|loss = F.mse_loss",
        evidence={"targets", "predictions", "outside", "best_constant_answer"},
    )


def test_large_targets_on_both_sides_of_0_are_named(watch: Nursery) -> None:
    run = watch(PRICES.replace("BASE", "0").replace("SPREAD", "60000"))
    run.names_first("data.unscaled-target", step=0, at="|loss = F.mse_loss", evidence={"targets", "predictions"})


def test_targets_that_the_output_is_still_far_from_are_named_rather_than_the_rate(watch: Nursery) -> None:
    longer = PRICES.replace("BASE", "0").replace("SPREAD", "100").replace("150", "600").replace("1e-2", "1e-3")
    run = watch(longer)
    assert run.causes == ["data.unscaled-target"]
    assert run.first.severity == "warning"
    assert run.finding("lr.too-low").severity == "info"


def test_targets_that_the_output_moves_towards_until_the_end_are_named(watch: Nursery) -> None:
    run = watch(PRICES.replace("BASE", "0").replace("SPREAD", "300").replace("150", "300"))
    assert run.causes == ["data.unscaled-target"]
    assert run.first.severity == "warning"


def test_large_targets_explain_steps_that_are_as_large_as_the_errors(watch: Nursery) -> None:
    thrown = PRICES.replace("BASE", "0").replace("SPREAD", "60000").replace("ReLU", "Tanh")
    run = watch(thrown.replace("Adam", "SGD").replace("1e-2", "3e-2"))
    assert run.causes == ["data.unscaled-target"]
    assert run.finding("lr.too-high").severity == "info"


def test_noise_in_large_targets_is_not_their_scale(watch: Nursery) -> None:
    noisy = PRICES.replace("BASE", "150").replace("SPREAD", "40").replace("0.3 *", "1.2 *").replace("150)", "1200)")
    run = watch(noisy)
    assert run.loaded[0].steps == 1200
    assert run.causes == []


def test_targets_that_the_output_reaches_may_be_large(watch: Nursery) -> None:
    assert "data.unscaled-target" not in watch(PRICES.replace("BASE", "20").replace("SPREAD", "5")).causes
