"""`without_gradients` is `torch.no_grad()` without a call that a script could notice."""

import pytest
import torch

from surefoot.core.gradient_mode import without_gradients


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
