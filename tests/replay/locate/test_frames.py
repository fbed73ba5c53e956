"""Where an operation was called, read off the stack."""

import torch
from torch import nn

from surefoot.core.operations import OperationMode, autograd_node
from surefoot.replay.locate.frames import Place, is_code_of_user, look


class Looking(OperationMode):
    def __init__(self):
        super().__init__()
        self.scenes = {}

    def on_operation(self, func, args, kwargs):
        self.scenes[func._schema.name] = look(in_backward=autograd_node() is not None)
        return func(*args, **kwargs)


class Net(nn.Module):
    def forward(self, x):
        return x.exp()


def test_forward_has_its_line_and_its_module():
    net, x = Net(), torch.ones(2, requires_grad=True)
    with Looking() as mode:
        net(x).sum().backward()
    scene = mode.scenes["aten::exp"]
    assert scene.module is net
    assert scene.place.function == "forward"
    assert scene.place.file == __file__
    assert scene.place.source == "return x.exp()"
    assert not scene.optimizer


def test_backward_has_no_line_of_its_own():
    x = torch.ones(2, requires_grad=True)
    with Looking() as mode:
        (x * 3).sum().backward()
    assert mode.scenes["aten::expand"].place is None or mode.scenes["aten::expand"].place.file == __file__


def test_an_optimizer_is_known():
    x = torch.ones(2, requires_grad=True)
    x.grad = torch.ones(2)
    optimizer = torch.optim.SGD([x], lr=0.1, foreach=False)
    with Looking() as mode:
        optimizer.step()
    assert mode.scenes["aten::add_"].optimizer


def test_files_of_the_user():
    assert is_code_of_user(__file__)
    assert is_code_of_user("<stdin>")
    assert not is_code_of_user("<frozen importlib._bootstrap>")
    assert not is_code_of_user(torch.__file__)
    assert str(Place("train.py", 3, "f")) == "train.py:3"
    assert Place("no such file", 3, "f").source == ""
