"""Step 3: a few rows are memorised, or something other than the data is wrong."""

import torch
from torch import nn

from doctor_probing import context_of
from surefoot.doctor.overfit import check_overfit


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
