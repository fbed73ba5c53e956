"""The last calls before the one that fails are remembered, on both levels."""

import torch
from torch import nn

from surefoot.replay.export.call_recorder import WINDOW, CallRecorder
from surefoot.replay.locate.names import Names
from surefoot.replay.locate.recorder import OperationRecorder


def number_of(step, name):
    recorder = OperationRecorder(Names(step, None))
    with recorder:
        step()
    return recorder.calls.index(name)


def test_the_function_around_the_operation_is_found_and_then_captured():
    x = torch.tensor([0.0, 1.0])

    def step():
        return (x * 2).log().sum()

    operation = number_of(step, "aten.log.default")
    first = CallRecorder(Names(step, None), operation)
    with first:
        step()
    assert first.found_call is not None
    assert not first.in_backward
    assert str(first.captured_operation.bad.func) == "aten.log.default"
    second = CallRecorder(Names(step, None), operation, first.found_call)
    with second:
        step()
    captured = second.captured_call
    assert captured.bad.func.__name__ == "log"
    (value,) = captured.values[next(iter(captured.bad.inputs))][None]
    assert value.tolist() == [0.0, 2.0]


def test_in_backward_the_gradient_that_arrived_is_kept():
    x = torch.zeros(1, requires_grad=True)

    def step():
        (x.sqrt() * 3).sum().backward()

    operation = number_of(step, "aten.div.Tensor")
    first = CallRecorder(Names(step, None), operation)
    with first:
        step()
    assert first.in_backward
    second = CallRecorder(Names(step, None), operation, first.found_call)
    with second:
        step()
    assert second.captured_call.upstream[""].tolist() == [3.0]


def test_only_the_last_calls_are_held():
    x = torch.ones(2)

    def step():
        y = x
        for _ in range(3 * WINDOW):
            y = y + 1
        return (y * 0).log()

    operation = number_of(step, "aten.log.default")
    recorder = CallRecorder(Names(step, None), operation)
    with recorder:
        step()
    assert len(recorder.captured_operation.calls) == WINDOW + 1


def test_bytes_that_were_there_before_are_counted():
    model = nn.Linear(4, 1)
    x = torch.ones(2, 4)

    def step():
        return (model(x) * 0).log()

    recorder = CallRecorder(Names(step, model), number_of(step, "aten.log.default"))
    with recorder:
        step()
    assert recorder.came_from == 4 * (4 + 1 + 8)
