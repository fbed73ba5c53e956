"""Predictions and scores that are bounded, on real scripts and from facts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest

from recorded import class_scores, run_with_losses
from surefoot.diagnose.rules.output_bounds import bounded_output
from watched import CLASSES, FIT, LOOP, NET, VALUES

if TYPE_CHECKING:
    from watched import Nursery

SQUARES = "loss_of = F.mse_loss"
CROSS_ENTROPY = "loss_of = F.cross_entropy"


def test_targets_beyond_a_sigmoid_are_out_of_reach(watch: Nursery) -> None:
    model = FIT.replace("nn.Linear(32, 1)", "nn.Linear(32, 1), nn.Sigmoid()")
    run = watch(VALUES, SQUARES, model, LOOP)
    found = run.names_first(
        "loss.bounded-output",
        step=0,
        at="|loss = loss_of",
        evidence={"operation", "bounds", "targets", "out_of_reach"},
    )
    assert found.evidence["operation"] == "sigmoid"
    assert found.evidence["bounds"] == [0, 1]
    assert found.evidence["out_of_reach"] > 0.3


@pytest.mark.parametrize(
    ("act", "targets"),
    [
        ("nn.Sigmoid()", "y = torch.sigmoid(y)"),
        ("nn.Tanh()", "y = torch.tanh(3 * y)"),
        ("nn.ReLU()", "y = y.abs() + 0.5"),
    ],
)
def test_targets_within_the_bounds_are_fine(watch: Nursery, act: str, targets: str) -> None:
    model = FIT.replace("nn.Linear(32, 1)", f"nn.Linear(32, 1), {act}") + "nn.init.constant_(model[2].bias, 0.5)"
    run = watch(VALUES, targets, SQUARES, model, LOOP)
    assert "loss.bounded-output" not in [f.cause for f in run.diagnosis.findings]


# Scores that cannot be below 0

RECTIFIED = NET.replace("nn.Linear(32, 3)", "nn.Linear(32, 3), nn.ReLU()")
SILENT = "nn.init.constant_(model[2].bias, -3.0)"


def test_a_relu_on_the_scores_of_three_classes_that_silences_them_is_named(watch: Nursery) -> None:
    run = watch(CLASSES, CROSS_ENTROPY, RECTIFIED, SILENT, LOOP)
    found = run.names_first(
        "loss.bounded-output", step=0, at="|loss = loss_of", evidence={"operation", "never_predicted", "loss"}
    )
    assert found.evidence["operation"] == "relu"
    assert len(found.evidence["never_predicted"]) == 2
    assert found.fixes[0].startswith("Remove the relu at")


def test_a_relu_on_the_scores_that_does_no_harm_is_not_named(watch: Nursery) -> None:
    run = watch(CLASSES, CROSS_ENTROPY, RECTIFIED, "nn.init.constant_(model[2].bias, 1.0)", LOOP)
    assert run.causes == []


def test_a_relu_before_binary_cross_entropy_leaves_no_probability_below_one_half(watch: Nursery) -> None:
    model = FIT.replace("nn.Linear(32, 1)", "nn.Linear(32, 1), nn.ReLU()")
    run = watch(VALUES, "y = (y > 0).float()", "loss_of = F.binary_cross_entropy_with_logits", model, LOOP)
    found = run.names_first("loss.bounded-output", step=0, at="|loss = loss_of", evidence={"operation", "loss"})
    assert "no probability can be below 0.5" in found.summary


# From facts


def test_similarities_without_a_temperature_cannot_reach_a_low_loss() -> None:
    claim = bounded_output(run_with_losses(lambda s: [class_scores(s, 5, -0.9, 0.99, 9.0)]))
    assert claim is not None
    assert claim.evidence["floor"] == pytest.approx(math.log(1 + 63 * math.exp(-2)))
    assert "temperature" in claim.fixes[0]
    assert bounded_output(run_with_losses(lambda s: [class_scores(s, 5, -0.9, 14.0, 9.0)])) is None
    new = run_with_losses(lambda s: [class_scores(s, 5, -0.3, 0.4, 9.0)])
    assert bounded_output(new) is None, "scores that never come close to 1 have only not grown yet"
    wrong = run_with_losses(lambda s: [class_scores(s, 5, -0.9, 0.99, 9.0, accuracy=0.02)])
    assert bounded_output(wrong) is None, "predictions that are wrong have another reason"
    assert claim.severity == "error"
    done = bounded_output(run_with_losses(lambda s: [class_scores(s, 5, -0.9, 0.99, 9.0, accuracy=0.97)]))
    assert done is not None
    assert done.severity == "info", "the bounds did no harm"
