"""What reaches losses, embeddings and activations is recorded by value, however they are called."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from surefoot.core.operations import RunningModules
from surefoot.doctor.function_calls import FunctionCalls, Recorded


def recorded(model, run, trace_nan=False):
    found = Recorded()
    with (
        RunningModules(model, lambda *_: None, lambda *_: None) as running,
        FunctionCalls(found, running, trace_nan),
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


def test_lookups_and_activations_carry_their_module():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3), nn.ReLU(), nn.Tanh())
    found = recorded(model, lambda: model(torch.tensor([[0, 4]])))
    assert [(lookup.where, lookup.table_rows) for lookup in found.lookups] == [("0", 5)]
    assert [(each.where, each.kind) for each in found.activations] == [("2", "relu"), ("3", "tanh")]


def test_silent_and_saturated_units_are_counted():
    found = recorded(
        nn.Identity(), lambda: (torch.relu(torch.tensor([[-1.0, 2.0], [-3.0, 0.5]])), torch.tensor([9.0, 0.0]).tanh())
    )
    rectified, bounded = found.activations
    assert rectified.silent_units().tolist() == [True, False]
    assert bounded.saturated_share() == 0.5


def test_the_first_operation_that_makes_a_nan_is_named():
    model = nn.Sequential(nn.ReLU())

    def run():
        x = model(torch.tensor([-1.0]))
        return (x / x).sqrt()

    assert recorded(model, run, trace_nan=True).first_nan[0] in ("div", "__truediv__", "true_divide")
    assert recorded(model, run).first_nan is None
