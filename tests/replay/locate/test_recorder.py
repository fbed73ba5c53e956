"""Every operation of a step is seen, and everything it wrote can be put back."""

import torch
from torch import nn

from surefoot.replay.locate.names import Names
from surefoot.replay.locate.recorder import OperationRecorder


def recorded(step, model=None, repair=()):
    recorder = OperationRecorder(Names(step, model), repair)
    with recorder:
        step()
    return recorder


def test_the_first_bad_operation_and_what_came_of_it_are_linked():
    x = torch.tensor([0.0, 1.0])
    recorder = recorded(lambda: (x.log() * 2).sum())
    last = recorder.last_bad
    assert last.op == "aten.sum.default"
    (times,) = last.parents
    (log,) = times.parents
    assert log.op == "aten.log.default"
    assert log.counts.negative_inf == 1
    assert log.parents == ()
    assert recorder.calls[-3:] == ["aten.log.default", "aten.mul.Tensor", "aten.sum.default"]


def test_a_repaired_operation_leaves_a_sound_result():
    x = torch.tensor([0.0, 1.0])
    results = []

    def step():
        results.append(x.log())

    recorder = recorded(step)
    index = recorder.calls.index("aten.log.default")
    recorder = recorded(step, repair={index})
    assert recorder.last_bad is None
    assert recorder.mended[index].negative_inf == 1
    assert bool(results[-1].isfinite().all())


def test_weights_buffers_and_gradients_are_put_back():
    model = nn.BatchNorm1d(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def step():
        loss = model(torch.randn(4, 2)).square().sum()
        loss.backward()
        optimizer.step()

    recorder = recorded(step, model)
    assert any(not torch.equal(value, before[name]) for name, value in model.state_dict().items())
    recorder.put_back()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_an_operation_that_refuses_a_bad_value_is_known():
    x = torch.tensor([float("nan")])
    recorder = OperationRecorder(Names(lambda: x, None))
    try:
        with recorder:
            torch.nn.functional.binary_cross_entropy(x, torch.ones(1))
    except RuntimeError:
        pass
    assert recorder.refused is True
