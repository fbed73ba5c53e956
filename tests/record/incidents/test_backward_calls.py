"""Every backward is heard of once, whatever it does, and nobody is kept alive for it."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from surefoot.record.incidents.backward_calls import listen


class Recorder:
    def __init__(self) -> None:
        self.begun = 0
        self.roots: list[float] = []

    def before_backward(self) -> None:
        self.begun += 1

    def ran_backward(self, root: torch.Tensor) -> None:
        self.roots.append(float(root.detach()))


def test_a_backward_by_method_or_by_function_is_heard_of_once():
    function = torch.autograd.backward
    recorder, x = Recorder(), torch.ones(2, requires_grad=True)
    listen(recorder)
    x.sum().backward()
    torch.autograd.backward([3 * x.sum()])
    assert (recorder.begun, recorder.roots) == (2, [2.0, 6.0])
    assert torch.autograd.backward is function


def test_a_backward_inside_another_is_part_of_it():
    recorder, x = Recorder(), torch.ones(2, requires_grad=True)
    listen(recorder)
    checkpoint(torch.exp, x, use_reentrant=True).sum().backward()
    assert recorder.begun == 1
    assert len(recorder.roots) == 1


def test_a_backward_that_raises_does_not_hide_the_next():
    recorder, x = Recorder(), torch.ones(2, requires_grad=True)
    listen(recorder)
    with pytest.raises(RuntimeError):
        (2 * x).backward()
    x.sum().backward()
    assert (recorder.begun, recorder.roots) == (2, [2.0])


def test_a_listener_dies_when_nobody_else_holds_it():
    recorder = Recorder()
    listen(recorder)
    gone = weakref.ref(recorder)
    del recorder
    assert gone() is None
    torch.ones(1, requires_grad=True).sum().backward()
