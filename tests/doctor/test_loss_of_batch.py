"""How a loss is got out of a batch: the common loops are recognised."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from surefoot.doctor.loss_of_batch import (
    NoLoss,
    conventions,
    describe,
    loss_taker,
    own_loss,
    prediction_of,
    takes_model,
)


def first_that_runs(batch, model, loss_fn):
    for way in conventions(batch, model, loss_fn):
        try:
            return way.name, way.loss(loss_fn, way.forward(model, batch), batch)
        except Exception:
            continue
    return None


def test_a_pair_is_input_and_target():
    x, y = torch.randn(4, 2), torch.randint(3, (4,))
    model = nn.Linear(2, 3)
    name, loss = first_that_runs((x, y), model, F.cross_entropy)
    assert name == "loss_fn(model(batch[0]), batch[1])"
    assert torch.equal(loss, F.cross_entropy(model(x), y))


def test_a_mapping_finds_its_target_by_name():
    batch = {"x": torch.randn(4, 2), "labels": torch.randint(3, (4,))}

    class Net(nn.Linear):
        def forward(self, x):
            return super().forward(x)

    name, _ = first_that_runs(batch, Net(2, 3), F.cross_entropy)
    assert name == "loss_fn(model(x), batch['labels'])"


def test_a_model_with_a_loss_of_its_own_needs_no_loss_function():
    class Net(nn.Linear):
        def forward(self, x, y):
            return {"loss": F.mse_loss(super().forward(x), y)}

    name, loss = first_that_runs((torch.randn(4, 2), torch.zeros(4, 3)), Net(2, 3), None)
    assert "model(*batch)" in name or "model(batch[0]" in name
    assert loss.dim() == 0


def test_somebody_who_says_how_is_believed():
    way = loss_taker(lambda model, batch: model(batch).sum())
    model, batch = nn.Linear(2, 1), torch.ones(1, 2)
    assert torch.equal(way.loss(None, way.forward(model, batch), batch), model(batch).sum())
    assert takes_model(lambda model, batch: None)
    assert not takes_model(lambda prediction, target: None)
    assert not takes_model(F.cross_entropy)


def test_predictions_and_losses_within_outputs():
    logits = torch.randn(2, 3)
    assert prediction_of(SimpleNamespace(logits=logits)) is logits
    assert prediction_of(("note", logits)) is logits
    assert own_loss((torch.tensor(1.0), logits)).item() == 1.0
    with pytest.raises(NoLoss, match="no loss"):
        own_loss(logits)
    with pytest.raises(NoLoss, match="without a tensor"):
        prediction_of(3)


def test_values_are_described_in_a_few_words():
    assert describe({"x": torch.ones(2, 3), "n": [1]}) == "{x: float32 (2, 3), n: (int)}"
