"""Predictions and targets whose shapes differ."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from watched import FIT, LOOP, VALUES

if TYPE_CHECKING:
    from watched import Nursery

SQUARES = "loss_of = F.mse_loss"


@pytest.mark.parametrize(
    "loss", [SQUARES, "loss_of = lambda given, target: ((given - target) ** 2).mean()"], ids=["mse_loss", "by hand"]
)
def test_a_column_against_a_row_broadcasts(watch: Nursery, loss: str) -> None:
    run = watch(VALUES, "import warnings; warnings.simplefilter('ignore'); y = y[:, 0]", loss, FIT, LOOP)
    at = "|loss = loss_of" if "mse" in loss else "|(given - target)"
    found = run.names_first("loss.broadcast", step=0, at=at, evidence={"prediction", "target", "broadcast", "loss"})
    assert (found.evidence["prediction"], found.evidence["target"]) == ([32, 1], [32])
    assert found.evidence["broadcast"] == [32, 32]


SHAPES_THAT_GROW = {
    "both columns": (SQUARES, FIT),
    "quantiles against one target": (
        "def loss_of(given, target):\n"
        "    error = target - given\n"
        "    level = torch.tensor([0.1, 0.5, 0.9])\n"
        "    return torch.maximum(error * level, error * (level - 1)).mean()",
        FIT.replace("(32, 1)", "(32, 3)"),
    ),
    "distances of all pairs": (
        "def loss_of(given, target):\n"
        "    apart = (given[:, None] - given[None]).square().sum(-1)\n"
        "    wanted = (target[:, None] - target[None]).square().sum(-1)\n"
        "    return F.smooth_l1_loss(apart, wanted)",
        FIT.replace("(32, 1)", "(32, 4)"),
    ),
}


@pytest.mark.parametrize("name", SHAPES_THAT_GROW)
def test_shapes_that_grow_on_purpose_are_fine(watch: Nursery, name: str) -> None:
    assert watch(VALUES, *SHAPES_THAT_GROW[name], LOOP).causes == []


@pytest.mark.parametrize("side", ["target", "prediction"])
def test_a_side_that_was_broadcast_while_it_was_computed_is_named(watch: Nursery, side: str) -> None:
    squares = {
        "target": "loss_of = lambda given, target: F.mse_loss(given, target + 0.1 * target[:, 0])",
        "prediction": "loss_of = lambda given, target: F.mse_loss(given + 0.1 * given[:, 0], target)",
    }
    run = watch(VALUES, "import warnings; warnings.simplefilter('ignore')", squares[side], FIT, LOOP)
    found = run.names_first("loss.broadcast", step=0, at="|loss_of = ", evidence={"prediction", "target", "loss"})
    assert found.evidence[side] == [32, 32]
    assert f"operands of the {side}" in found.fixes[0]


def test_one_target_for_every_row_is_fine(watch: Nursery) -> None:
    loss = "loss_of = lambda given, target: F.mse_loss(given, target.mean(0, keepdim=True).expand(1, 1))"
    run = watch(VALUES, "import warnings; warnings.simplefilter('ignore'); y = y[:, :1]", loss, FIT, LOOP)
    assert "loss.broadcast" not in run.causes


@pytest.mark.parametrize(
    ("change", "outputs"), [("y = torch.cat([y, -y], 1)", 1), ("y = (2 * y).round().clamp(-2, 2) + 2", 5)]
)
def test_a_loss_of_one_side_for_several_of_the_other_is_named(watch: Nursery, change: str, outputs: int) -> None:
    model = FIT.replace("nn.Linear(32, 1)", f"nn.Linear(32, {outputs})")
    run = watch(VALUES, change, model, "loss_of = F.mse_loss\n", LOOP.replace("(32,)", "(128,)"))
    run.names_first("loss.broadcast", step=0, at="|loss = ", evidence={"prediction", "target", "loss"})


def test_several_predictions_of_one_target_may_be_meant(watch: Nursery) -> None:
    ensemble = FIT.replace("nn.Linear(32, 1)", "nn.Linear(32, 5)")
    assert not watch(VALUES, ensemble, "loss_of = F.mse_loss\n", LOOP).causes
