"""The first gradients that are not finite are recorded, however they are found."""

import pytest
import torch
from torch import nn

from surefoot.record.facts import NonFiniteGradientEvent
from surefoot.watch.context import WatchContext, WatchOptions
from surefoot.watch.nonfinite_gradients import NonFiniteGradients


@pytest.fixture
def context() -> WatchContext:
    return WatchContext(WatchOptions())


def broken_layer() -> nn.Linear:
    layer = nn.Linear(2, 2)
    layer.weight.grad, layer.bias.grad = torch.full((2, 2), torch.inf), torch.ones(2)
    return layer


def test_the_parameters_of_the_first_ones_are_named_and_later_ones_are_not_recorded(context: WatchContext) -> None:
    layer, gradients = broken_layer(), NonFiniteGradients(context)
    gradients.record(torch.optim.SGD(layer.named_parameters()))
    gradients.record_unmeasured({"at": 7, "loss": 1.0})
    (event,) = context.events.events
    assert isinstance(event, NonFiniteGradientEvent)
    assert (event.step, len(event.parameters), len(event.finite)) == (0, 1, 1)


def test_those_that_a_scaler_takes_care_of_are_not_recorded(context: WatchContext) -> None:
    context.state.scaler.enabled = True
    NonFiniteGradients(context).record(torch.optim.SGD(broken_layer().parameters()))
    assert list(context.events.events) == []
