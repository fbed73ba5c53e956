"""How the model is judged: random evaluations, and labels of other rows."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from watched import Nursery

DATA = """
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
centres = 3 * torch.randn(5, 12)
y = torch.randint(5, (900,))
x = centres[y] + torch.randn(900, 12)
held_x, held_y = x[600:], y[600:]
"""

NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.out = nn.Linear(12, 32), nn.Linear(32, 5)
    def forward(self, given):
        return self.out(HIDDEN)

model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
"""

LOOP = """
for epoch in range(8):
    model.train()
    for rows in torch.randperm(600).split(50):
        loss = F.cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        held = F.cross_entropy(model(held_x), held_y)
"""

MODE = "pass  # stays as it is"
DROPS = NET.replace("HIDDEN", "self.drop(F.relu(self.hidden(given)))").replace(
    "self.hidden, self.out =", "self.drop = nn.Dropout(0.3)\n        self.hidden, self.out ="
)
PLAIN = NET.replace("HIDDEN", "F.relu(self.hidden(given))")


def net(dropout: str) -> str:
    return NET.replace("HIDDEN", f"F.dropout(F.relu(self.hidden(given)), {dropout})")


def test_a_functional_dropout_that_eval_does_not_switch_off_is_named(watch: Nursery) -> None:
    run = watch(DATA, net("0.5"), LOOP)
    first = run.names_first("eval.random-eval", step=12, at="|F.dropout", evidence={"with_dropout", "p"})
    assert first.evidence["p"] == 0.5
    assert "`training=self.training`" in first.fixes[0]


@pytest.mark.parametrize("dropout", ["0.5, training=self.training", "0.0", "0.5, self.training"])
def test_a_dropout_that_eval_switches_off_is_no_fault(watch: Nursery, dropout: str) -> None:
    run = watch(DATA, net(dropout), LOOP)
    assert run.causes == []
    recorded = run.loaded[0].evaluation_calls  # two of eight lie in sampled steps, and the budget may leave some out
    assert 3 <= len(recorded) <= 6
    assert {len(block.losses) for block in recorded} == {1}


def test_an_ensemble_of_dropout_masks_is_meant(watch: Nursery) -> None:
    many = LOOP.replace("held = ", "draws = torch.stack([model(held_x) for _ in range(8)])\n        held = ")
    assert "eval.random-eval" not in watch(DATA, net("0.5"), many).causes


def test_the_attention_of_torch_drops_in_evaluation_too(watch: Nursery) -> None:
    attends = NET.replace(
        "HIDDEN",
        "self.mix(F.relu(self.hidden(given))))\n\n    def mix(self, h):\n"
        "        h = h.view(-1, 1, 4, 8)\n"
        "        return F.scaled_dot_product_attention(h, h, h, dropout_p=0.2).reshape(-1, 32",
    )
    run = watch(DATA, attends, LOOP)
    assert run.first.cause == "eval.random-eval"
    assert "dropout_p=" in run.first.fixes[0]


@pytest.mark.parametrize("change", ["held_y = held_y.sort().values", "held_y = held_y[torch.randperm(300)]"])
def test_evaluation_labels_of_other_rows_are_named(watch: Nursery, change: str) -> None:
    run = watch(DATA, change, PLAIN, LOOP)
    first = run.first
    assert run.causes == ["eval.labels-mismatched"]
    assert run.at("|held = ") in first.where
    assert float(str(first.evidence["evaluation_accuracy"])) < 0.3 < float(str(first.evidence["training_accuracy"]))


@pytest.mark.parametrize(
    "counted", ["(model(held_x).argmax(1) == held_y).sum()", "torch.max(model(held_x).data, 1)[1].eq(held_y).sum()"]
)
def test_evaluation_labels_of_other_rows_are_named_without_a_loss(watch: Nursery, counted: str) -> None:
    answers = re.sub(r"held = .*", f"held = {counted}", LOOP)
    run = watch(DATA, "held_y = held_y.roll(1)", PLAIN, answers)
    assert run.causes == ["eval.labels-mismatched"]
    assert run.at("|held = ") in run.first.where
    assert not watch(DATA, PLAIN, answers).causes


def test_labels_learned_by_heart_are_not_blamed_on_the_evaluation(watch: Nursery) -> None:
    random_labels = "y = torch.randint(5, (900,))\nheld_y = y[600:]\n"
    run = watch(DATA, random_labels, PLAIN.replace("32", "512"), LOOP.replace("range(8)", "range(40)"))
    assert "eval.labels-mismatched" not in run.causes


def test_few_labels_of_evaluation_rows_do_not_suffice(watch: Nursery) -> None:
    few = "held_x, held_y = held_x[:12], held_y[:12].flip(0)"
    assert "eval.labels-mismatched" not in watch(DATA, few, PLAIN, LOOP).causes


def test_an_evaluation_keeps_no_tensor_alive(watch: Nursery) -> None:
    let_go = (
        LOOP
        + """
        import weakref
        goals = held_y.clone()
        known = weakref.ref(goals)
        F.cross_entropy(model(held_x), goals)
        del goals
        assert known() is None
"""
    )
    run = watch(DATA, PLAIN, let_go)
    assert run.exit_code == 0, run.errors
    assert {len(block.losses) for block in run.loaded[0].evaluation_calls} == {2}


# ── evaluation with gradients on ─────────────────────────────────────────────────────────────────────────────────────

WITH_GRADIENTS = LOOP.replace("model.eval()", MODE).replace("with torch.no_grad():", "for part in range(2):")


def test_forwards_in_training_mode_that_no_backward_goes_through_are_named(watch: Nursery) -> None:
    run = watch(DATA, DROPS, WITH_GRADIENTS)
    first = run.names_first("model.train-mode-eval", step=24, at="|held = ", evidence={"passes", "dropouts"})
    assert "`model.eval()`" in first.fixes[0]


def test_forwards_in_evaluation_mode_may_have_gradients_on(watch: Nursery) -> None:
    assert watch(DATA, DROPS, WITH_GRADIENTS.replace(MODE, "model.eval()")).causes == []


def test_forwards_at_every_step_are_a_part_of_training(watch: Nursery) -> None:
    """A model that makes labels for itself, for instance."""
    each = LOOP.replace("loss = ", "guess = model(x[600:650]).argmax(1)\n        loss = ").replace(
        "with torch.no_grad():\n        held", "if False:\n        held"
    )
    assert watch(DATA, DROPS, each).causes == []


def test_an_evaluation_in_a_compiled_run_is_left_alone(watch: Nursery) -> None:
    compiled = "model.forward = torch.compile(model.forward, backend='eager')\n"
    assert watch(DATA, PLAIN, compiled, LOOP).loaded[0].evaluation_calls == []
