"""Both levels of recording: what is seen, under which name, and what is left as it was."""

import sys
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefoot.core.operations import (
    FunctionMode,
    OperationMode,
    RunningModules,
    arguments_by_name,
    autograd_node,
    called_from,
    entered_modes,
    function_name,
    without_modes,
)


class Functions(FunctionMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def on_function(self, func, args, kwargs):
        self.names.append(function_name(func))
        return func(*args, **kwargs)


class Operations(OperationMode):
    def __init__(self):
        super().__init__()
        self.names, self.in_backward = [], []

    def on_operation(self, func, args, kwargs):
        self.names.append(str(func))
        self.in_backward.append(autograd_node() is not None)
        return func(*args, **kwargs)


@pytest.mark.parametrize(
    ("func", "name"),
    [
        (torch.sub, "sub"),
        (Tensor.__sub__, "sub"),
        (Tensor.subtract, "sub"),
        (Tensor.__rsub__, "rsub"),
        (F.cross_entropy, "cross_entropy"),
        (Tensor.shape.__get__, "shape"),
        (Tensor.data.__set__, "_set"),
        (torch.linalg.vector_norm, "norm"),
    ],
)
def test_all_spellings_of_a_function_have_one_name(func, name):
    assert function_name(func) == name


def test_functions_are_seen_as_written_without_what_they_call():
    with Functions() as seen:
        loss = F.cross_entropy(torch.zeros(2, 3), torch.tensor([0, 1])) - 1
    assert seen.names[-2:] == ["cross_entropy", "sub"]
    assert float(loss) == pytest.approx(torch.log(torch.tensor(3.0)) - 1)


def test_operations_are_seen_in_forward_and_backward():
    x = torch.ones(2, requires_grad=True)
    with Operations() as seen:
        x.exp().sum().backward()
    assert seen.names[0] == "aten.exp.default"
    assert seen.in_backward[0] is False
    assert seen.in_backward[-1] is True
    assert torch.equal(x.grad, torch.ones(2).exp())


def test_an_operation_mode_does_not_load_the_compiler():
    had = "torch._dynamo" in sys.modules
    with Operations():
        torch.ones(2) + 1
    assert ("torch._dynamo" in sys.modules) == had


def test_unseen_code_goes_through_no_mode():
    with Functions() as functions, Operations() as operations:
        with without_modes():
            torch.ones(2).exp()
        assert functions.names == []
        assert operations.names == []
        torch.exp(torch.ones(2))
    assert functions.names
    assert operations.names


def test_a_mode_can_be_taken_off_from_below_another():
    ours, theirs = Functions(), Functions()
    ours.__enter__()
    theirs.__enter__()
    assert not ours.is_on_top()
    assert ours.is_entered()
    ours.leave()
    assert entered_modes() == [theirs]
    assert not ours.is_entered()
    theirs.leave()
    assert entered_modes() == []


def test_arguments_get_their_names_and_defaults():
    x, y = torch.zeros(2, 3), torch.tensor([0, 1])
    found = arguments_by_name(F.cross_entropy, (x,), {"target": y})
    assert found["input"] is x
    assert found["target"] is y
    assert found["ignore_index"] == -100


def test_a_warning_names_the_line_that_called_the_function():
    def warn():
        warnings.warn("careful", stacklevel=2)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        frame = sys._getframe()
        call, line = called_from(frame), frame.f_lineno
        call(warn, (), {})
    assert caught[0].filename == __file__
    assert caught[0].lineno == line


def test_running_modules_are_known_by_name_and_hooks_are_removed():
    model = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.ReLU()))
    seen = []
    with RunningModules(
        model,
        before=lambda name, module, args, kwargs: seen.append(("in", name, type(module).__name__, running.innermost)),
        after=lambda name, module, output: seen.append(("out", name, tuple(output.shape), running.innermost)),
    ) as running:
        model(torch.zeros(4, 2))
    assert seen == [
        ("in", "", "Sequential", ""),
        ("in", "0", "Linear", "0"),
        ("out", "0", (4, 3), ""),
        ("in", "1", "Sequential", "1"),
        ("in", "1.0", "ReLU", "1.0"),
        ("out", "1.0", (4, 3), "1"),
        ("out", "1", (4, 3), ""),
        ("out", "", (4, 3), ""),
    ]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_module_that_raises_is_no_longer_running():
    model = nn.Sequential(nn.Linear(2, 3))
    outputs = []
    running = RunningModules(model, lambda *_: None, lambda name, module, output: outputs.append(output))
    with running, pytest.raises(RuntimeError):
        model(torch.zeros(4, 5))
    assert running.innermost == ""
    assert outputs == [None, None]
