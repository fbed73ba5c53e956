"""What is asked of an optimizer's parameters outside of sampled steps."""

import torch
from torch import nn

from surefoot.watch.optimizer_record import first_gradient_norm, least, left_share


def test_the_first_gradient_that_there_is_tells_of_what_is_not_finite_above_it():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters())
    assert first_gradient_norm(optimizer) is None
    loss = model(torch.ones(2, 3)).square().sum()
    loss.backward()
    norm = first_gradient_norm(optimizer)
    assert norm is not None
    assert not norm.requires_grad
    assert norm.item() == torch.linalg.vector_norm(model[1].weight.grad).item()
    optimizer.zero_grad()
    (model(torch.ones(2, 3)) * 0).sqrt().sum().backward()  # the derivative at 0 is infinite
    assert not first_gradient_norm(optimizer).isfinite()


def test_a_gradient_that_cannot_be_read_is_left_alone():
    table = nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    assert first_gradient_norm(torch.optim.SGD(table.parameters())) is None


def test_the_share_of_parameters_that_still_have_a_gradient():
    tensors = [torch.ones(2, requires_grad=True) for _ in range(4)]
    tensors[0].grad = torch.ones(2)
    tensors[1].grad = torch.zeros(2)
    assert left_share(tensors) == 0.25
    assert least([0.5, 0.25]) == 0.25
    assert least([torch.tensor(0.5), 0.25]).item() == 0.25
