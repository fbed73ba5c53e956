"""Errors that end many scripts: the summary says what to change, with the names of the script."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from watched import CLASSES, LOOP, NET

if TYPE_CHECKING:
    from watched import Nursery

LOSS = "loss_of = F.cross_entropy\n"
BY_HAND = """
w = (torch.randn(8, 3) / 3).requires_grad_()
for step in range(60):
    loss = F.cross_entropy(x @ w, y)
    loss.backward()
    UPDATE
"""
TWO_PLAYERS = """
real = torch.randn(64, 4)
make, judge = nn.Linear(2, 4), nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
first = torch.optim.Adam(judge.parameters(), lr=1e-3)
second = torch.optim.Adam(make.parameters(), lr=1e-3)
for step in range(10):
    fake = judge(make(torch.randn(64, 2)))
    first_loss, second_loss = fake.mean() - judge(real).mean(), -fake.mean()
    first.zero_grad()
    first_loss.backward(retain_graph=True)
    first.step()
    second.zero_grad()
    second_loss.backward()
    second.step()
"""

STATE = """
cell, state = nn.GRUCell(8, 4), torch.zeros(32, 4)
optimizer = torch.optim.Adam(cell.parameters())
for step in range(10):
    state = cell(x[:32], state)
    loss = state.square().mean()
    optimizer.zero_grad()
    loss.backward(retain_graph=True)
    optimizer.step()
"""

CASES = {
    "weights replaced by results": (
        (CLASSES, BY_HAND.replace("UPDATE", "w = w - 0.1 * w.grad")),
        "`w` is no longer the tensor that requires a gradient but the result of an operation, whose `.grad` is None: "
        "change it in place, `with torch.no_grad(): w -= lr * w.grad`",
    ),
    "weights replaced by results without a graph": (
        (CLASSES, BY_HAND.replace("UPDATE", "with torch.no_grad(): w = w - 0.1 * w.grad\n    w.grad.zero_()")),
        "`w` is no longer the tensor that requires a gradient",
    ),
    "weights changed in place with a graph": (
        (CLASSES, BY_HAND.replace("UPDATE", "w -= 0.1 * w.grad")),
        "`with torch.no_grad(): w -= lr * w.grad`",
    ),
    "a step before a backward of the same pass": (
        (CLASSES, TWO_PLAYERS),
        "changed `judge.2.weight` after the forward pass that this "
        "backward belongs to: call this `backward()` before that `step()`",
    ),
    "a state of an earlier step": (
        (CLASSES, STATE),
        "has changed `weight_hh` since: this backward also goes through the "
        "forward pass of an earlier step. Detach what is carried over from it, as in `state = state.detach()`.",
    ),
    "a result changed in place": (
        (CLASSES, LOSS, NET, LOOP.replace("model(x[rows])", "model(x[rows]).sigmoid().mul_(model(x[rows]))")),
        "Backward needs the result of sigmoid with shape [32, 3], and it was changed after the forward pass",
    ),
    "a loss of many numbers": (
        (CLASSES, "loss_of = nn.CrossEntropyLoss(reduction='none')\n", NET, LOOP),
        "as in `loss.mean().backward()`",
    ),
    "one graph for two calls": (
        (CLASSES, LOSS, NET, LOOP.replace("    loss.backward()\n", "    loss.backward()\n    (2 * loss).backward()\n")),
        "add the losses and call `backward()` once",
    ),
    "doubles of NumPy": (
        (CLASSES, "x = torch.from_numpy(x.numpy().astype('float64'))\n", LOSS, NET, LOOP),
        "was given values of type double, and its weights are of type float: convert the values with `.float()`",
    ),
    "weights of doubles": (
        (CLASSES, LOSS, NET.replace("nn.Linear(32, 3))", "nn.Linear(32, 3)).double()"), LOOP),
        "convert the values with `.double()`",
    ),
    "a layer for other features": (
        (CLASSES, LOSS, NET.replace("nn.Linear(32, 3)", "nn.Linear(16, 3)"), LOOP),
        "The layer expects 16 features in the last dimension and was given 32",
    ),
    "a model without parameters": (
        (CLASSES, "class Net(nn.Module):\n    layers = [nn.Linear(8, 3)]\n",
         "optimizer = torch.optim.Adam(Net().parameters())\n"),
        "keep layers as attributes or in `nn.ModuleList`",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_summary_says_what_to_change(watch: Nursery, name: str) -> None:
    parts, advice = CASES[name]
    run = watch(*parts)
    assert run.diagnosis.verdict == "unknown"
    assert advice in run.diagnosis.summary


def test_an_error_of_the_script_itself_gets_no_advice(watch: Nursery) -> None:
    run = watch(CLASSES, LOSS, NET, LOOP, "raise ValueError('no such metric')\n")
    assert run.diagnosis.summary.endswith("no fault was found until then.")


def test_a_missing_value_elsewhere_is_not_taken_for_a_gradient(watch: Nursery) -> None:
    update = "with torch.no_grad(): w -= 0.1 * w.grad\n    w.grad.zero_()\n    None.step()"
    run = watch(CLASSES, BY_HAND.replace("UPDATE", update))
    assert run.diagnosis.summary.endswith("no fault was found until then.")
