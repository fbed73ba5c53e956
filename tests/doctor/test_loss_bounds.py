"""The bounds of a loss are those that a search over answers finds."""

import pytest
import torch
import torch.nn.functional as F

from surefoot.core.operations import arguments_by_name
from surefoot.doctor.function_calls import LossInput
from surefoot.doctor.loss_bounds import constant_answer_loss, lowest_loss


def call(function, answer, target, **settings):
    given = arguments_by_name(function, (answer, target), settings)
    del given["input"], given["target"]
    return LossInput(function.__name__, answer, target, given, function(answer, target, **settings))


def best_constant(function, shape, target, **settings):
    """The lowest loss over answers that are the same in every row, found by descent."""
    answer = torch.zeros(shape[1:], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([answer], lr=0.05)
    for _ in range(2000):
        optimizer.zero_grad()
        loss = function(answer.expand(shape), target, **settings)
        loss.backward()
        optimizer.step()
    return float(loss.detach())


LABELS = torch.tensor([0, 1, 1, 2, 1, 0, 1, -100])
SHARES = torch.softmax(torch.randn(8, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64), 1)
BITS = torch.tensor([[0.0, 1], [1, 1], [0, 0], [0, 1]], dtype=torch.float64)
NUMBERS = torch.randn(9, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize(
    ("function", "shape", "target", "settings"),
    [
        (F.cross_entropy, (8, 3), LABELS, {}),
        (F.cross_entropy, (8, 3), LABELS, {"label_smoothing": 0.1}),
        (F.cross_entropy, (8, 3), SHARES, {}),
        (F.binary_cross_entropy_with_logits, (4, 2), BITS, {}),
        (F.mse_loss, (9, 2), NUMBERS, {}),
        (F.l1_loss, (9, 2), NUMBERS, {}),
    ],
    ids=["classes", "smoothed", "shares", "bits", "squares", "distances"],
)
def test_no_answer_without_inputs_is_better(function, shape, target, settings):
    found = constant_answer_loss(call(function, torch.zeros(shape, dtype=torch.float64), target, **settings))
    assert found == pytest.approx(best_constant(function, shape, target, **settings), abs=0.03)


def test_the_lowest_loss_is_that_of_the_right_answer():
    smoothed = torch.where(F.one_hot(LABELS[:7], 3).bool(), 0.9 + 0.1 / 3, 0.1 / 3).log().double()
    seen = call(F.cross_entropy, smoothed, LABELS[:7], label_smoothing=0.1)
    assert lowest_loss(seen) == pytest.approx(float(seen.value))
    seen = call(F.cross_entropy, SHARES.log(), SHARES)
    assert lowest_loss(seen) == pytest.approx(float(seen.value))
    assert lowest_loss(call(F.binary_cross_entropy_with_logits, BITS, BITS)) == 0.0
    assert lowest_loss(call(F.mse_loss, NUMBERS, NUMBERS)) == 0.0


def test_what_is_not_known_is_not_guessed():
    answer = torch.zeros(8, 3, dtype=torch.float64)
    for settings in ({"weight": torch.ones(3, dtype=torch.float64)}, {"reduction": "sum"}):
        assert constant_answer_loss(call(F.cross_entropy, answer, LABELS, **settings)) is None
    assert constant_answer_loss(call(F.huber_loss, NUMBERS, NUMBERS)) is None
    assert constant_answer_loss(call(F.cross_entropy, answer, torch.full((8,), -100))) is None
