"""The last calls before the one that fails are remembered, on both levels."""

import torch
from torch import nn

from recorded_calls import captured
from surefoot.replay.export.call_recorder import WINDOW, CallRecorder, keep_values, key_of, plain_copy
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


def test_a_write_makes_another_value():
    x = torch.zeros(3)
    before = key_of(x)
    assert key_of(x.view(3)) == before
    assert key_of(x[:2]) != before
    x.add_(1)
    assert key_of(x) != before


def test_values_that_were_overwritten_are_not_kept():
    x, y = torch.ones(2), torch.ones(2)

    def step():
        z = x + y
        y.zero_()
        return z

    calls = captured(step).calls
    kept = keep_values(calls[:1])
    assert key_of(x) in kept
    assert calls[0].inputs.keys() - kept.keys()
    assert captured(step).bad is not None


def test_an_output_is_the_input_of_the_next_call():
    calls = captured(lambda: torch.ones(2).exp().log()).calls
    assert calls[-2].outputs.keys() == calls[-1].inputs.keys()


def test_copies_have_no_graph_no_view_and_no_subclass():
    x = torch.nn.Parameter(torch.ones(2, 2)).T
    copy = plain_copy(x)
    assert type(copy) is torch.Tensor
    assert not copy.requires_grad
    assert copy.is_contiguous()
    assert not plain_copy(torch.tensor([1j]).conj()).is_conj()
    assert key_of(torch.ones(2).to_sparse()).storage[0] == "odd"
