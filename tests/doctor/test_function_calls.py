"""What reaches losses and embeddings is recorded by value, however they are called."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from surefoot.core.operations import RunningModules
from surefoot.doctor.function_calls import FunctionCalls, Recorded


def recorded(model, run):
    found = Recorded()
    with (
        RunningModules(model, lambda *_: None, lambda *_: None) as running,
        FunctionCalls(found, running),
    ):
        run()
    return found


def test_a_loss_is_recorded_with_its_defaults_and_its_value():
    logits, target = torch.randn(4, 3), torch.tensor([0, 1, 2, -100])
    (call,) = recorded(nn.Identity(), lambda: nn.CrossEntropyLoss()(logits, target)).losses
    assert call.kind == "cross_entropy"
    assert call.settings["reduction"] == "mean"
    assert call.class_count == 3
    assert call.has_indices
    assert call.valid.tolist() == [True, True, True, False]
    assert torch.equal(call.value, F.cross_entropy(logits, target))


def test_a_loss_that_raises_is_recorded_all_the_same():
    found = Recorded()
    running = RunningModules(nn.Identity(), lambda *_: None, lambda *_: None)
    with pytest.raises(IndexError), running, FunctionCalls(found, running):
        F.cross_entropy(torch.randn(2, 3), torch.tensor([0, 7]))
    assert found.losses[0].value is None
    assert found.losses[0].target.tolist() == [0, 7]


def test_lookups_carry_their_module():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3))
    found = recorded(model, lambda: model(torch.tensor([[0, 4]])))
    assert [(lookup.where, lookup.table_rows) for lookup in found.lookups] == [("0", 5)]
