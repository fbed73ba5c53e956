"""Undefined operations, on real scripts; each operation by itself is in test_autopsy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from recorded import SITE, look, run
from surefoot.diagnose.rules import loss_domain
from watched import CLASSES, FIT, LOOP, NET, VALUES

if TYPE_CHECKING:
    from watched import Nursery


def test_a_root_of_zero_has_a_finite_loss_and_an_infinite_gradient(watch: Nursery) -> None:
    by_hand = """
    def loss_of(given, target):
        apart = torch.sqrt((given - given.T) ** 2)
        return ((apart - (target - target.T).abs()) ** 2).mean()
    """
    run = watch(VALUES, by_hand, FIT, LOOP)
    found = run.names_first("loss.undefined-op", step=0, at="|torch.sqrt(", evidence={"parameters", "backward", "step"})
    assert found.evidence["backward"]["op"].lower().startswith("sqrt")
    assert found.evidence["loss_finite"]
    assert found.fixes[0].startswith("Add an eps under the root, for example `(x + 1e-8).sqrt()`")


def test_of_several_operations_on_a_line_the_one_closest_to_its_edge_is_named() -> None:
    risky = [{"op": "sqrt", "site": SITE, "nearest_zero": 0.01}, {"op": "div", "site": SITE, "nearest_zero": 0.1}]
    event = {"event": "nonfinite-gradient", "step": 31, "parameters": ["emb.weight"], "loss_finite": True}
    claim = loss_domain.undefined_op(run(sampled_steps=[look(0, notes={"risky": risky})], events=[event]))
    assert claim is not None
    assert f"the input of sqrt at {SITE} came closest" in claim.summary
    assert "(distance 0.01)" in claim.summary
    assert claim.fixes[0].startswith("Add an eps under the root")


def test_the_fix_for_the_logarithm_of_a_probability_that_underflows_is_one_for_logarithms(watch: Nursery) -> None:
    by_hand = """
    def loss_of(given, target):
        return -torch.log(torch.sigmoid(5000 * given)).mean()
    """
    run = watch(VALUES, by_hand, FIT, LOOP)
    assert run.causes[0] == "loss.undefined-op", run.diagnosis
    found = run.diagnosis.findings[0]
    assert "`log_softmax` or `logsigmoid`" in found.fixes[0]


@pytest.mark.parametrize(
    "loss",
    [
        "loss_of = lambda given, target: -(given.softmax(-1) + 1e-8).log()[torch.arange(len(target)), target].mean()",
        "loss_of = lambda given, target: F.cross_entropy(torch.where(given > -99, given, given.log()), target)",
    ],
    ids=["log with an eps", "a branch that is never taken"],
)
def test_a_guarded_logarithm_is_fine(watch: Nursery, loss: str) -> None:
    assert watch(CLASSES, loss, NET, LOOP).causes == []


def test_a_logarithm_that_meets_nan_data_is_not_to_blame(watch: Nursery) -> None:
    loss = "loss_of = lambda given, target: -(given.softmax(-1) + 1e-8).log()[torch.arange(len(target)), target].mean()"
    run = watch(CLASSES, "x[17, 3] = torch.nan", loss, NET, LOOP)
    assert run.first.cause == "data.nonfinite-input"
    assert "loss.undefined-op" not in run.causes


def test_an_exponential_that_overflows_after_a_blow_up_is_a_consequence(watch: Nursery) -> None:
    model = FIT.replace("optim.Adam", "optim.SGD").replace("1e-2", "3.0")
    run = watch(VALUES, "loss_of = F.mse_loss", model, LOOP)
    assert run.first.cause == "lr.too-high"
    assert "loss.undefined-op" not in run.causes


def test_a_logarithm_of_zero_after_a_step_that_replaced_the_weights_is_a_consequence(watch: Nursery) -> None:
    model = NET.replace("1e-2", "5.0")
    loss = "loss_of = lambda given, target: -torch.log(given.softmax(1).gather(1, target[:, None])).mean()"
    run = watch(CLASSES, model, loss, LOOP)
    assert run.first.cause == "lr.too-high"
    small = watch(CLASSES, model.replace("5.0", "1e-3"), "x = 300 * x", loss, LOOP)
    assert small.first.cause == "loss.undefined-op", "with steps of ordinary size the operation is the cause"
