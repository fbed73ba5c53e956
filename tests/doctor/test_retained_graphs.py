"""Step 9: graphs of past steps that a model keeps are counted."""

import torch
from torch import nn

from doctor_probing import context_of
from surefoot.doctor.retained_graphs import check_graphs

BATCH = [(torch.ones(8, 2), torch.zeros(8, 1))]


class Keeps(nn.Linear):
    def __init__(self):
        super().__init__(2, 1)
        self.history = []

    def forward(self, x):
        self.history.append(super().forward(x))
        return self.history[-1]


def check(model, optimizer=True):
    sgd = torch.optim.SGD(model.parameters(), lr=0.01) if optimizer else None
    (found,) = check_graphs(context_of(model, BATCH, nn.MSELoss(), sgd))
    return found


def test_a_list_of_outputs_is_a_leak():
    assert check(Keeps()).cause == "memory.graph-retained"


def test_an_ordinary_model_keeps_nothing():
    assert check(nn.Linear(2, 1)).status == "pass"
    assert check(nn.Linear(2, 1), optimizer=False).status == "skipped"
