"""Step 3: a few rows are memorised, or something other than the data is wrong."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from doctor_probing import context_of
from surefoot.core.operations import arguments_by_name
from surefoot.doctor.function_calls import LossInput
from surefoot.doctor.overfit import check_overfit, constant_answer_loss, lowest_loss


def check(model, y, loss_fn=None, lr=0.05):
    torch.manual_seed(0)
    batches = [(torch.randn(16, 4), y)]
    context = context_of(
        model, batches, loss_fn or nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=lr), seconds=60
    )
    (found,) = check_overfit(context)
    return found, context


def test_a_model_that_can_learn_passes_whatever_its_own_rate():
    found, context = check(nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 3)), torch.arange(16) % 3, lr=1e-9)
    assert found.status == "pass"
    assert context.preflight.overfits is True
    assert context.preflight.tiny_batch_left < 0.5


def test_a_model_that_ignores_its_input_does_not():
    class Deaf(nn.Linear):
        def forward(self, x):
            return super().forward(x * 0)

    found, context = check(Deaf(4, 3, bias=False), torch.arange(16) % 3)
    assert found.status in ("warn", "fail")
    assert context.preflight.overfits is False


class Deaf(nn.Module):
    """Ignores its input, and can still learn how frequent the labels are."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x * 0)


def test_learning_how_frequent_the_labels_are_is_not_overfitting():
    few, context = check(Deaf(nn.Linear(4, 3)), torch.arange(16) % 3)
    assert (few.status, context.preflight.overfits) == ("warn", False)
    assert few.expected == "a loss below 1.082, the loss of a prediction that ignores the inputs"
    far = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 3))
    far[2].bias.data = torch.tensor([0.0, 0.0, 40.0])  # the first loss is so high that most of it goes away at once
    many, context = check(Deaf(far), torch.arange(16) % 3)
    assert (many.status, context.preflight.overfits) == ("fail", False)
    assert many.summary.endswith("a prediction that ignores the inputs reaches 1.082")
    numbers, _ = check(Deaf(nn.Linear(4, 1)), torch.randn(16, 1), nn.MSELoss())
    assert numbers.status == "warn"


def test_a_model_of_few_weights_has_to_use_its_input_only():
    found, context = check(nn.Linear(4, 3), torch.arange(16) % 3)
    assert (found.status, context.preflight.overfits) == ("pass", True)
    assert found.number < 1.0
    assert found.expected == "a loss below 1.082, the loss of a prediction that ignores the inputs"


def test_an_unknown_loss_that_falls_a_little_proves_nothing():
    def loss_fn(output, target):
        return nn.functional.mse_loss(output, target) + output.square().mean()

    found, context = check(Deaf(nn.Linear(4, 1)), torch.randn(16, 1), loss_fn)
    assert (found.status, context.preflight.overfits) == ("skipped", None)
    assert found.summary.startswith("inconclusive: the loss goes from ")


def test_a_second_step_that_raises_is_reported():
    class Carries(nn.Linear):
        state = None

        def forward(self, x):
            out = super().forward(x) + (0 if self.state is None else self.state)
            self.state = out.mean()
            return out

    found, _ = check(Carries(4, 3), torch.arange(16) % 3)
    assert found.cause == "memory.graph-retained"


def test_nothing_to_train_is_skipped():
    model = nn.Linear(4, 3)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    context = context_of(model, [(torch.ones(4, 4), torch.zeros(4, dtype=torch.int64))], nn.CrossEntropyLoss())
    assert [check.status for check in check_overfit(context)] == ["skipped"]


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
