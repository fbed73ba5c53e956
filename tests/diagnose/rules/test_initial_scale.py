"""Initial weights that are too large, too small or equal, on real scripts; and those that are unusual on purpose."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from recorded import look, parameter, run
from surefoot.diagnose.curves import LossCurve
from surefoot.diagnose.rules import initial_scale
from watched import CLASSES, LOOP, NET, deep

if TYPE_CHECKING:
    from watched import Nursery

START = CLASSES + "loss_of = F.cross_entropy\n"


def drawn(std: str) -> str:
    return f"for part in model:\n    if isinstance(part, nn.Linear): nn.init.normal_(part.weight, std={std})\n"


DEAD_BELOW_A_ZERO_HEAD = """
model[2].weight.data.zero_()
model[0].bias.data.fill_(-30.0)
"""


def test_a_head_that_starts_at_0_behind_dead_units_is_not_symmetric(watch: Nursery) -> None:
    run = watch(START, NET, DEAD_BELOW_A_ZERO_HEAD, LOOP)
    assert run.first.cause == "model.dead-units"
    assert "init.symmetric" not in run.causes


def test_weights_drawn_too_large_are_named_with_their_gain(watch: Nursery) -> None:
    run = watch(START, deep(rate="1e-3"), drawn("4.0"), LOOP)
    found = run.names_first(
        "init.too-large", step=0, at="0.weight", evidence={"gains", "spread_in", "spread_largest", "first_loss"}
    )
    assert max(found.evidence["gains"]) > 10
    assert found.evidence["spread_in"] == pytest.approx(1, rel=0.2)


def test_weights_that_were_never_initialised_are_named(watch: Nursery) -> None:
    run = watch(START, NET, "model[0].weight.data.fill_(float('nan'))\n", LOOP)
    found = run.names_first("init.too-large", step=0, at="0.weight", evidence={"parameters", "count"})
    assert "never initialised" in found.summary


def test_large_weights_that_do_no_harm_are_mentioned(watch: Nursery) -> None:
    run = watch(START, NET, drawn("0.9"), LOOP.replace("range(60)", "range(300)"))
    assert run.causes == []
    assert run.finding("init.too-large").severity == "info"


def test_weights_drawn_too_small_are_named_with_their_gain(watch: Nursery) -> None:
    run = watch(START, deep(rate="1e-3"), drawn("0.01"), LOOP)
    found = run.names_first("init.too-small", step=0, at="0.weight", evidence={"gains", "spread_in", "spread_last"})
    assert max(found.evidence["gains"]) < 0.1


def test_small_weights_between_norms_do_not_make_activations_vanish(watch: Nursery) -> None:
    """Layers whose weights have 0.05 times the scale that preserves it; the loss does not fall in either script."""
    body = """
import torch
from torch import nn

torch.manual_seed(0)
x, y = torch.randn(256, 16), torch.randint(4, (256,))
layers = [part for _ in range(4) for part in (BETWEEN, nn.Linear(16, 16), nn.GELU())]
model = nn.Sequential(*layers, nn.Linear(16, 4))
for layer in model:
    if isinstance(layer, nn.Linear):
        nn.init.normal_(layer.weight, std=0.0125)
        nn.init.normal_(layer.bias, std=0.02)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-5)
for step in range(60):
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
    assert "init.too-small" in watch(body.replace("BETWEEN", "nn.Identity()")).causes
    assert "init.too-small" not in watch(body.replace("BETWEEN", "nn.LayerNorm(16)")).causes


def test_a_head_that_starts_at_zero_does_not_make_the_weights_before_it_too_small(watch: Nursery) -> None:
    run = watch(START, deep(rate="3.0"), "nn.init.zeros_(model[-1].weight)", LOOP)
    assert run.first.cause == "lr.too-high"
    assert "init.too-small" not in run.causes


def test_rows_that_all_begin_alike_are_not_activations_that_vanish(watch: Nursery) -> None:
    """Every path of a simulation starts in the same state, and what is earned on it cannot be learned."""
    body = """
import torch
from torch import nn

torch.manual_seed(0)
layers = [part for _ in range(4) for part in (nn.Linear(32, 32), nn.ReLU())]
model = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), *layers, nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
for step in range(60):
    held, state, earned = torch.zeros(128, 1), torch.tensor([[0.0, 0.3]]).expand(128, 2), torch.zeros(128, 1)
    for _ in range(3):
        held = model(torch.cat([state, held], 1))
        move = 0.1 * torch.randn(128, 1)
        state, earned = state + torch.cat([move, -0.1 * torch.ones(128, 1)], 1), earned + held * move
    loss = (earned - torch.randn(128, 1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
    assert "init.too-small" not in watch(body).causes


def test_usual_weights_are_fine(watch: Nursery) -> None:
    assert watch(START, deep(layers=4), drawn("0.25"), LOOP).causes == []


def test_large_data_is_not_large_weights(watch: Nursery) -> None:
    run = watch(START, "x = x * 100 + 500", deep(rate="0.1", optimizer="SGD"), LOOP)
    assert run.first.cause == "data.unscaled-input"
    assert "init.too-large" not in run.causes


ZERO_BRANCHES = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.up, self.down, self.head = (
            nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 3)
        )
        for part in (self.down, self.head):
            nn.init.zeros_(part.weight)
            nn.init.zeros_(part.bias)

    def forward(self, given):
        given = F.relu(self.stem(given))
        return self.head(given + self.down(F.relu(self.up(given))))

model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
"""


def test_branches_and_heads_that_start_at_zero_are_fine(watch: Nursery) -> None:
    assert watch(START, ZERO_BRANCHES, LOOP).causes == []


def test_units_that_start_equal_and_stay_equal_are_named(watch: Nursery) -> None:
    alike = "for weight in model.parameters(): nn.init.constant_(weight, 0.1)"
    run = watch(START, NET, alike, LOOP)
    found = run.names_first("init.symmetric", step=0, at="0.weight", evidence={"parameters", "units", "largest_weight"})
    assert found.evidence["units"] == 32
    assert found.evidence["largest_weight"] == pytest.approx(0.1)


def test_an_embedding_and_norms_that_start_equal_are_fine(watch: Nursery) -> None:
    model = """
    ids = torch.randint(10, (256,))
    y = ids % 3
    x = ids
    model = nn.Sequential(nn.Embedding(10, 16), nn.LayerNorm(16), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
    nn.init.zeros_(model[2].weight)
    """
    assert watch(START, model, LOOP).causes == []


def test_hidden_units_with_equal_weights_that_only_their_biases_separate_are_named(watch: Nursery) -> None:
    model = "model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3))"
    made = "optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)"
    constant = "nn.init.constant_(model[0].weight, 0.05)\nnn.init.constant_(model[2].weight, 0.05)"
    loss = "loss_of = F.cross_entropy"
    slow = watch(CLASSES, loss, model, constant, made.replace("1e-2", "1e-4"), LOOP).finding("init.symmetric")
    assert slow.severity != "info"
    assert slow.where[:2] == ("0.weight", "2.weight")
    found = watch(CLASSES, loss, model, constant, made, LOOP).finding("init.symmetric")
    assert found.severity == "info"  # the loss ended far below the best constant answer all the same
    assert watch(CLASSES, loss, model, "nn.init.zeros_(model[4].weight)", made, LOOP).causes == []


@pytest.mark.parametrize(
    ("norms", "end", "severity"),
    [((0.1, 0.1), 1.0, "warning"), ((0.1, 0.1), 1.99, "error"), ((0.1, 0.1), 0.2, None), ((0.1, 3.0), 1.0, None)],
)
def test_weights_that_are_all_tiny_are_named_if_much_is_left_to_learn(
    norms: tuple[float, float], end: float, severity: str | None
) -> None:
    held = [parameter(number) | {"first": {"norm": norm}} for number, norm in enumerate(norms)]
    slow = [2.0 + (end - 2.0) * step / 99 for step in range(100)]
    claim = initial_scale.init_too_small(run(slow, parameters=held))
    assert (claim.severity if claim is not None else None) == severity


@pytest.mark.parametrize(("steps", "end", "severity"), [(60, 0.3, "warning"), (10, 1.5, "warning"), (10, 0.3, "info")])
def test_large_weights_that_start_far_above_chance_are_named_if_that_cost_many_steps_or_nearly_all_is_left(
    steps: int, end: float, severity: str
) -> None:
    held = [parameter(number) | {"first": {"norm": 30.0, "std": 3.0, "fan_in": 4}} for number in (0, 1)]
    spread = {"op": "linear", "grad": True, "site": "", "module": ""}
    layers = [spread | {"parameter": 0, "in_std": 1.0, "out_std": 6.0}, spread | {"parameter": 1, "out_std": 30.0}]
    found = run(parameters=held, sampled_steps=[look(0, notes={"layers": layers})])
    losses = [9.0 + (end - 9.0) * min(1.0, step / steps) for step in range(100)]
    found.curve = LossCurve(losses, [*range(100)], chance=2.0)
    claim = initial_scale.init_too_large(found)
    assert claim is not None
    assert claim.severity == severity


def test_weights_of_one_sign_count_with_their_mean() -> None:
    scale = {"norm": 6.53, "std": 0.289, "fan_in": 16}  # of 128 weights, uniform from 0 to 1
    shapes = {"shape": [8, 16], "first": scale}
    layers = [{"op": "linear", "grad": True, "site": "", "module": "", "parameter": i, "out_std": 9.0} for i in (0, 1)]
    held = run(parameters=[parameter(i) | shapes for i in (0, 1)], sampled_steps=[look(0, notes={"layers": layers})])
    held.curve = LossCurve([40.0 - 0.39 * step for step in range(100)], [*range(100)], chance=2.0)
    claim = initial_scale.init_too_large(held)
    assert claim is not None
    assert claim.severity == "warning"
    assert claim.evidence["gains"][0] == pytest.approx(2.31, abs=0.01)


@pytest.mark.parametrize(("row_range", "severity"), [(0.5, "warning"), (3.0, "info")])
def test_units_that_start_equal_do_harm_if_they_are_still_alike_at_the_end(row_range: float, severity: str) -> None:
    scale = {"norm": 4.0, "std": 0.1, "rows_equal": False, "row_range": row_range}
    first = {"norm": 1.0, "std": 0.0, "rows_equal": True, "fan_in": 8}
    kind = {"module_type": "LSTM", "first": first, "last": scale, "in_graph": 3}
    head = {"op": "linear", "grad": True, "site": "", "module": "", "parameter": 1, "out_std": 1.0}
    held = [parameter(0) | kind, parameter(1)]
    claim = initial_scale.init_symmetric(run(parameters=held, sampled_steps=[look(0, notes={"layers": [head]})]))
    assert claim is not None
    assert claim.severity == severity
