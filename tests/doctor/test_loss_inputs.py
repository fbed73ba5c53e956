"""Step 2: what reaches the loss is what it expects."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from doctor_probing import context_of, only
from surefoot.doctor.loss_inputs import check_agreement

X = torch.linspace(-1, 1, 32).reshape(8, 4)
LABELS, ONES = torch.arange(8) % 3, torch.ones(8, 1)


class Squashed(nn.Module):
    """A bounded output that no operation of torch's announces."""

    def __init__(self, outputs):
        super().__init__()
        self.layer = nn.Linear(4, outputs)

    def forward(self, x):
        x = self.layer(x)
        return x / (1 + x.abs())


def checks_of(model, target, loss_fn):
    return check_agreement(context_of(model, [(X, target)], loss_fn))


BCE_LOGITS = F.binary_cross_entropy_with_logits


@pytest.mark.parametrize(
    ("model", "target", "loss_fn", "cause"),
    [
        (nn.Linear(4, 3), LABELS, F.cross_entropy, None),
        (nn.Sequential(nn.Linear(4, 3), nn.Softmax(-1)), LABELS, F.cross_entropy, "loss.softmax-before-cross-entropy"),
        (Squashed(3), LABELS, F.cross_entropy, "loss.bounded-output"),
        (nn.Linear(4, 3), LABELS, F.nll_loss, "loss.logits-into-probability-loss"),
        (nn.Sequential(nn.Linear(4, 3), nn.LogSoftmax(-1)), LABELS, F.nll_loss, None),
        (nn.Linear(4, 1), ONES, BCE_LOGITS, None),
        (nn.Sequential(nn.Linear(4, 1), nn.Sigmoid()), ONES, BCE_LOGITS, "loss.sigmoid-before-bce-logits"),
        (nn.Sequential(nn.Linear(4, 1), nn.Sigmoid()), ONES, F.binary_cross_entropy, None),
        (nn.Sequential(nn.Linear(4, 1), nn.Sigmoid()), 5 * X[:, :1], F.mse_loss, "loss.bounded-output"),
        (nn.Linear(4, 1), 5 * X[:, :1], F.mse_loss, None),
    ],
)  # fmt: skip
def test_the_input_of_the_loss_is_judged(model, target, loss_fn, cause):
    check = only(checks_of(model, target, loss_fn), "loss input")
    assert check.cause == cause
    assert check.status == ("pass" if cause is None else "fail")


def test_a_prediction_that_meets_every_target_is_a_fault():
    def by_hand(prediction, target):
        return (prediction - target).square().mean()

    assert only(checks_of(nn.Linear(4, 1), X[:, 0], by_hand), "target shape").cause == "loss.broadcast"
    assert only(checks_of(nn.Linear(4, 1), X[:, :1], by_hand), "target shape").status == "pass"


def test_the_negative_of_a_loss_is_a_fault():
    target = torch.arange(8) % 3
    assert only(checks_of(nn.Linear(4, 3), target, lambda p, y: -F.cross_entropy(p, y)), "loss sign").cause
    assert only(checks_of(nn.Linear(4, 3), target, F.cross_entropy), "loss sign").status == "pass"


def test_a_first_loss_that_is_not_finite_names_the_operation():
    check = only(checks_of(nn.Linear(4, 1), X[:, :1], lambda p, y: (p * 0 - 1).sqrt().mean()), "first loss")
    assert check.cause == "loss.undefined-op"
    assert "sqrt" in check.summary


def test_a_later_token_must_not_move_an_earlier_output():
    class Bag(nn.Module):
        def __init__(self, causal):
            super().__init__()
            self.table, self.head, self.causal = nn.Embedding(9, 6), nn.Linear(6, 9), causal

        def forward(self, ids):
            x = self.table(ids)
            x = x.cumsum(1) if self.causal else x + x.mean(1, keepdim=True)
            return self.head(x).transpose(1, 2)

    ids = torch.arange(28).reshape(4, 7) % 9
    batch = [(ids[:, :-1], ids[:, 1:])]
    leaks = check_agreement(context_of(Bag(False), batch, nn.CrossEntropyLoss()))
    sound = check_agreement(context_of(Bag(True), batch, nn.CrossEntropyLoss()))
    assert only(leaks, "causal").cause == "mask.leaks-future"
    assert only(sound, "causal").status == "pass"


def test_a_head_that_starts_at_zero_is_not_bounded():
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3, bias=False))
    nn.init.zeros_(model[1].weight)
    assert only(checks_of(model, torch.arange(8) % 3, F.cross_entropy), "loss input").status == "pass"
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1, bias=False))
    nn.init.zeros_(model[1].weight)
    assert only(checks_of(model, X[:, :1], F.mse_loss), "loss input").status == "pass"
