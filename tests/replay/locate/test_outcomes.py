"""The loss among what a step returned."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from surefoot.replay.locate.outcomes import find_loss, was_run

LOSS = torch.tensor(1.0, requires_grad=True) * 2
OTHER = torch.ones(3)


@dataclass
class Output:
    logits: torch.Tensor
    loss: torch.Tensor


@pytest.mark.parametrize(
    "returned",
    [
        LOSS,
        (OTHER, LOSS),
        {"accuracy": torch.tensor(0.5), "loss": LOSS},
        Output(OTHER, LOSS),
        SimpleNamespace(total=LOSS),
    ],
)
def test_the_loss_is_found_by_name_or_by_its_graph(returned):
    assert find_loss(returned) is LOSS


def test_without_a_single_number_there_is_none():
    assert find_loss(OTHER) is None
    assert find_loss(None) is None
    assert find_loss(3.0) is None


def test_a_graph_that_backward_went_through_is_known():
    loss = (torch.ones(2, requires_grad=True) * 2).sum()
    numbers = {int(loss.grad_fn._sequence_nr())}
    assert was_run(loss, numbers)
    assert not was_run(loss, set())
