"""Computing beside the script: no mode, no subclass and no autograd notices."""

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from surefoot.core.without_hooks import WithoutHooks, intercepts_operations, runs_eagerly, without_gradients


class Counting(TorchFunctionMode):
    calls = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.calls += 1
        return function(*args, **(kwargs or {}))


class Dispatching(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Strange(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return NotImplemented


def test_a_function_mode_does_not_hear_of_what_is_computed_inside():
    weight = torch.ones(2, requires_grad=True)
    with Counting() as mode:
        with WithoutHooks():
            total = weight.sum()
        assert mode.calls == 0
        weight.sum()
        assert mode.calls > 0
    assert not total.requires_grad
    assert torch.is_grad_enabled()


def test_gradients_stay_on_where_asked_for():
    weight = torch.ones(2, requires_grad=True)
    with WithoutHooks(grad=True):
        assert weight.sum().requires_grad
    with torch.no_grad(), WithoutHooks():
        pass
    with torch.no_grad():
        with WithoutHooks():
            pass
        assert not torch.is_grad_enabled()


def test_it_is_not_calm_under_a_dispatch_mode_or_a_transform():
    assert runs_eagerly()
    with Dispatching():
        assert not runs_eagerly()
    seen = []
    torch.func.vmap(lambda x: seen.append(runs_eagerly()) or x)(torch.ones(2))
    assert seen == [False]


def test_a_class_that_hears_of_every_operation_is_left_alone_and_torchs_own_are_not():
    assert not intercepts_operations(torch.ones(1))
    assert not intercepts_operations(torch.nn.Parameter(torch.ones(1)))
    assert intercepts_operations(torch.Tensor._make_subclass(Strange, torch.ones(1)))


@without_gradients
def state(fails=False):
    if fails:
        raise ValueError("failed")
    return torch.is_grad_enabled()


@pytest.mark.parametrize("enabled", [True, False])
def test_gradients_are_off_inside_and_as_before_after(enabled):
    with torch.set_grad_enabled(enabled):
        assert not state()
        assert torch.is_grad_enabled() is enabled
        with pytest.raises(ValueError, match="failed"):
            state(fails=True)
        assert torch.is_grad_enabled() is enabled


def test_a_function_that_a_script_has_replaced_is_not_called(monkeypatch):
    def replaced():
        raise AssertionError("called")

    monkeypatch.setattr(torch, "is_grad_enabled", replaced)
    monkeypatch.setattr(torch, "no_grad", replaced)

    @without_gradients
    def double(x):
        return x * 2

    assert double(torch.ones(1)).item() == 2
