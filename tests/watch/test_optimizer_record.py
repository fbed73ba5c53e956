"""What is asked of an optimizer's parameters outside of sampled steps."""

import torch

from surefoot.watch.optimizer_record import least, left_share


def test_the_share_of_parameters_that_still_have_a_gradient():
    tensors = [torch.ones(2, requires_grad=True) for _ in range(4)]
    tensors[0].grad = torch.ones(2)
    tensors[1].grad = torch.zeros(2)
    assert left_share(tensors) == 0.25
    assert least([0.5, 0.25]) == 0.25
    assert least([torch.tensor(0.5), 0.25]).item() == 0.25
