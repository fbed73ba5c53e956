"""Where gradients are computed: `backward`, `autograd.grad`, and the hooks that a script registers on either.

`Tensor.backward` calls `torch.autograd.backward`: the inner call is not reported. `autograd.grad` counts as a backward
call only in a loop without an optimizer, and only if the script itself calls it for a scalar. If the script has hooks
on gradients or on saved tensors, this is recorded, so that no extra backward pass calls them. Not covered: double
backward (`create_graph`), and hooks on nodes of the graph, which torch does not expose.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from surefoot.core.user_code import is_users
from surefoot.core.without_hooks import intercepts_operations
from surefoot.watch.script_hooks import script_hooks

if TYPE_CHECKING:
    from surefoot.watch.patches.hooks import Hooks
    from surefoot.watch.watcher import Watcher


def wrap_backward(watcher: Watcher, wrapping: Hooks) -> None:
    """Observe every call of the script that computes gradients."""
    calls = _BackwardCalls(watcher)
    why = "before gradients are computed: the loss, its graph and the line; afterwards: the gradients"
    wrapping.add(torch.autograd, "backward", "backward", why, calls.before, calls.after, calls.last)
    why = "the same as `torch.autograd.backward`, which it calls; under a function mode, from inside the mode"
    wrapping.add(Tensor, "backward", "backward", why, calls.before, calls.after, calls.last)
    why = "the loss of a loop that updates its parameters by hand"
    wrapping.add(torch.autograd, "grad", "backward", why, calls.before_grad, calls.after_grad, calls.last)


class _BackwardCalls:
    """Reports each outermost call that computes gradients."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher, self._probes = watcher, watcher.probes
        self._is_inside = False

    def before(self, args: Any, kwargs: Any) -> Any:
        if self._is_inside:
            return None
        root = args[0] if args else kwargs.get("tensors")
        if type(root) is not Tensor:
            root = _first(root)
            if not isinstance(root, Tensor) or intercepts_operations(root):
                return None
        if not self._probes.here():
            return None
        self._is_inside = True
        self._probes.safely("backward", self._watcher.backward.before, root)
        return True

    def after(self, token: Any, result: Any) -> None:
        self._is_inside = False
        self._probes.safely("backward", self._watcher.backward.after)

    def last(self, token: Any) -> None:
        self._is_inside = False

    def before_grad(self, args: Any, kwargs: Any) -> Any:
        """In a loop without an optimizer, `autograd.grad` begins a step."""
        root = _first(args[0])
        if (
            self._is_inside
            or self._watcher.optimizers.all
            or not isinstance(root, Tensor)
            or intercepts_operations(root)
        ):
            return None
        if args[4] or not self._probes.here():
            return None
        return self._probes.safely("backward", self._begin, root, sys._getframe(2).f_code.co_filename)

    def _begin(self, root: Tensor, filename: str) -> Any:
        if root.numel() != 1 or not is_users(filename):
            return None
        self._is_inside = True
        self._watcher.backward.before(root)
        return True

    def after_grad(self, token: Any, result: Any) -> None:
        self._is_inside = False
        self._probes.safely("backward", self._watcher.backward.after, result)


def _first(given: Any) -> Any:
    """The tensor, or the first of several."""
    if isinstance(given, (list, tuple)):
        return given[0] if given else None
    return given if isinstance(given, Tensor) else None


def wrap_script_hooks(wrapping: Hooks) -> None:
    """Record hooks of the script that an extra backward would call; `module_hooks` records the others."""

    def hooked(args: Any, kwargs: Any) -> None:
        script_hooks.gradients = True

    def hooked_saved(args: Any, kwargs: Any) -> None:
        script_hooks.saved = True

    why = "whether an extra backward pass would run a hook of the script; if so, there is no extra pass"
    wrapping.add(Tensor, "register_hook", "listeners", why, hooked)
    why = "whether reading a tensor that autograd saved would run a hook of the script; if so, none is read"
    wrapping.add(torch.autograd.graph.saved_tensors_hooks, "__enter__", "listeners", why, hooked_saved)


def wrap_function_modes(watcher: Watcher, wrapping: Hooks) -> None:
    """Remove the recorder before a function mode of the script exits below it."""

    def before(args: Any, kwargs: Any) -> Any:
        recorder = watcher.state.sampled.recorder if watcher.state.sampled is not None else None
        if recorder is None or args[0] is recorder or not watcher.probes.here() or not recorder.is_on_top():
            return None
        recorder.leave()
        return recorder

    def last(recorder: Any) -> None:
        recorder.__enter__()

    why = "the recorder of a sampled step is removed first, so that the mode that ends is the one on top"
    wrapping.add(TorchFunctionMode, "__exit__", "operations", why, before, None, last)
