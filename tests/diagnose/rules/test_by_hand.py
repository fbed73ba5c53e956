"""Loops without an optimizer: updates with the wrong sign, and weights that are forgotten."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from watched import CLASSES

if TYPE_CHECKING:
    from watched import Nursery

LOOP = """
first = (torch.randn(8, 16) / 3).requires_grad_()
second = (torch.randn(16, 3) / 4).requires_grad_()
for step in range(60):
    loss = F.cross_entropy((x @ first).relu() @ second, y)
    loss.backward()
    with torch.no_grad():
        first -= 0.5 * first.grad
        second -= 0.5 * second.grad
    first.grad.zero_()
    second.grad.zero_()
"""
MODEL = """
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
for step in range(60):
    model.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    for p in model.parameters():
        p.data.add_(p.grad, alpha=-0.5)
"""


@pytest.mark.parametrize("loop", [LOOP, MODEL])
def test_a_loop_that_goes_down_is_healthy(watch: Nursery, loop: str) -> None:
    assert watch(CLASSES, loop).diagnosis.verdict == "healthy"


@pytest.mark.parametrize("loop", [LOOP.replace("-=", "+="), MODEL.replace("alpha=-0.5", "alpha=0.5")])
def test_updates_along_the_gradient_have_the_wrong_sign(watch: Nursery, loop: str) -> None:
    run = watch(CLASSES, loop)
    found = run.names_first("loss.sign-flipped", step=0, at="|loss.backward()", evidence={"cosines", "first", "last"})
    assert min(found.evidence["cosines"]) > 0.99
    assert found.fixes[0] == "Subtract the gradient: `p -= lr * p.grad`, not `p += lr * p.grad`."


def test_inputs_that_raise_a_loss_are_adversarial_examples(watch: Nursery) -> None:
    attack = """
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
given = x[:64].clone().requires_grad_()
for step in range(60):
    loss = F.cross_entropy(model(given), y[:64])
    loss.backward()
    given.data += 0.1 * given.grad.sign()
    given.grad = None
"""
    assert "loss.sign-flipped" not in watch(CLASSES, attack).causes


def test_an_objective_of_the_scripts_own_may_be_raised(watch: Nursery) -> None:
    rise = """
w = torch.zeros(8, requires_grad=True)
for step in range(60):
    score = -((x @ w - x[:, 0]) ** 2).mean()
    score.backward()
    w.data += 0.1 * w.grad
    w.grad = None
"""
    assert watch(CLASSES, rise).diagnosis.verdict == "healthy"


def test_a_matrix_that_the_loop_forgets_is_named(watch: Nursery) -> None:
    run = watch(CLASSES, LOOP.replace("        first -= 0.5 * first.grad\n", ""))
    found = run.names_first("optim.parameters-missing", step=0, at="|loss.backward()", evidence={"parameters"})
    assert found.evidence["parameters"] == ["first"]
    assert "`first`" in found.fixes[0]


def test_inputs_that_require_a_gradient_are_not_forgotten_weights(watch: Nursery) -> None:
    run = watch(CLASSES, "x.requires_grad_()\n", LOOP + "    x.grad = None\n")
    assert run.diagnosis.verdict == "healthy"


def test_gradients_that_are_kept_are_cleared_without_an_optimizer(watch: Nursery) -> None:
    loop = LOOP.replace("    first.grad.zero_()\n    second.grad.zero_()\n", "")
    assert watch(CLASSES, loop).first.fixes[0].startswith("Clear each gradient after it was used: `p.grad.zero_()`")
