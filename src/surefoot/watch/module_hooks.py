"""Follows the calls of modules in a sampled step, through torch's global module hooks.

The running module gives every recorded operation its path. When an outermost call ends, it is recorded as a model call,
whose inputs and outputs `model_calls` describes.
"""

from __future__ import annotations

from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import (
    _global_forward_hooks_with_kwargs,
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from surefoot.core.without_hooks import runs_eagerly
from surefoot.watch.function_recorder import tensors_in
from surefoot.watch.script_hooks import script_hooks

if TYPE_CHECKING:
    from collections.abc import Callable

    from surefoot.watch.context import WatchContext
    from surefoot.watch.function_recorder import FunctionRecorder
    from surefoot.watch.model_calls import ModelCalls

COMPILED = "OptimizedModule"
"""The class of compiled models, by name, so that the compiler need not be imported."""
_FAST_PATHS = (nn.MultiheadAttention, nn.TransformerEncoder, nn.TransformerEncoderLayer)


class ModuleHooks:
    """Hooks on every module call of the current thread, and the recorder that is active in the meantime."""

    def __init__(
        self,
        context: WatchContext,
        recorder: FunctionRecorder | None,
        calls: ModelCalls,
        has_recorded_enough: Callable[[], bool],
    ) -> None:
        """Before a model call, if `has_recorded_enough`, the recorder is exited."""
        self._registry, self._safely = context.registry, context.probes.safely
        self._recorder, self._calls, self._has_recorded_enough = recorder, calls, has_recorded_enough
        self._memory, self._state = context.module_memory, context.state
        self._handles: list[Any] = []
        self._running: list[tuple[int, str]] = []
        """The running modules: identity and path of each."""
        self._paths: dict[int, str] = {}
        self._is_entered = False
        self._hidden_by = 0
        """The identity of a module that runs without the recorder."""
        self._thread = get_ident()

    def add(self) -> None:
        """Register the hooks and enter the recorder."""
        self._handles = [
            register_module_forward_pre_hook(self._before_call),
            register_module_forward_hook(self._after_call, with_kwargs=True, always_call=True),
        ]
        if self._recorder is not None:
            self._is_entered = True
            self._recorder.__enter__()  # type: ignore[no-untyped-call]

    def keep(self, handles: Any) -> None:
        """Remove other hooks together with these."""
        self._handles.extend(handles)

    def has_any(self) -> bool:
        """Whether a hook is registered."""
        return bool(self._handles)

    def remove(self) -> None:
        """Remove the hooks and exit the recorder, and keep the records."""
        for handle in self._handles:
            handle.remove()
            if isinstance(handle, RemovableHandle):  # torch does not release one of its own tables
                _global_forward_hooks_with_kwargs.pop(handle.id, None)
        self._handles = []
        self._leave_recorder()

    def _leave_recorder(self) -> None:
        if self._is_entered and self._recorder is not None:
            self._is_entered = False
            self._recorder.paused += 1
            self._recorder.leave()

    def note_compiled(self, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        """A compiled model was called."""
        self._calls.take(getattr(module, "_orig_mod", module), args, kwargs, out, self._position())

    def _before_call(self, module: nn.Module, args: Any) -> None:
        if self._follows(module):
            self._safely("model calls", self._enter_call, module, args)

    def _after_call(self, module: nn.Module, args: Any, *rest: Any) -> None:
        """`rest` is the keyword arguments and the result; after an exception, torch omits the keyword arguments."""
        if self._follows(module):
            kwargs, out = rest if len(rest) == 2 else ({}, None)
            self._safely("model calls", self._leave_call, module, args, kwargs, out)

    def _follows(self, module: nn.Module) -> bool:
        """Whether a call is followed. The wrapper of `torch.compile` is not, but the model inside is."""
        return get_ident() == self._thread and type(module).__name__ != COMPILED and runs_eagerly()

    def _enter_call(self, module: nn.Module, args: Any) -> None:
        if self._is_entered and not self._running and self._has_recorded_enough():
            self._leave_recorder()
            self._calls.keeps_features = False
        recorder = self._recorder
        if (
            self._is_entered
            and recorder is not None
            and isinstance(module, _FAST_PATHS)
            and not self._hidden_by
            and not _may_need_gradients(module, args)
            and recorder.is_entered()
        ):
            # While a mode is active, these modules take another path, which is slower and rounds differently.
            recorder.leave()
            self._hidden_by = id(module)
        if recorder is not None and not self._running:
            self._safely("names", self._name_parts, module)
        self._running.append((id(module), self._paths.get(id(module)) or type(module).__name__))
        if module._backward_hooks or module._backward_pre_hooks:
            script_hooks.gradients = True
        if recorder is not None:
            recorder.module = self._running[-1][1]
            self._safely("memory", self._memory.enter, id(module), recorder.module)

    def _leave_call(self, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        while self._running and self._running.pop()[0] != id(module):
            pass  # an inner call ended with an exception
        if self._hidden_by == id(module) and self._recorder is not None:
            self._hidden_by = 0
            if self._is_entered:
                self._recorder.__enter__()  # type: ignore[no-untyped-call]
        self._registry.note_gathered(module)
        if self._recorder is not None:
            self._recorder.module = self._running[-1][1] if self._running else ""
            self._safely("memory", self._memory.leave, id(module), self._state.steps)
        if not self._running:
            self._safely("model calls", self._calls.take, module, args, kwargs, out, self._position())
            if self._calls.has_enough():
                self.remove()

    def _position(self) -> int | None:
        """The number of calls recorded so far."""
        return len(self._recorder.entries) if self._recorder is not None else None

    def _name_parts(self, root: nn.Module) -> None:
        if id(root) not in self._paths and any(True for _ in root.parameters()):
            prefix = self._registry.add_model(root)
            for path, part in root.named_modules():
                self._paths[id(part)] = f"{prefix}.{path}" if path else prefix


def _may_need_gradients(module: nn.Module, args: Any) -> bool:
    """Whether a module cannot take its fast path, because of autograd or training mode."""
    if module.training:
        return True
    if not torch.is_grad_enabled():
        return False
    return any(tensor.requires_grad for tensor in [*tensors_in(args), *module.parameters()])
