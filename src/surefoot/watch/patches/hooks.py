"""Hooks on the functions whose calls the watcher observes (see `core.function_hooks`), and wrappers for experiments.

`around` puts a wrapper in the place of a function. Only `surefoot bisect` and `surefoot replay --experiments`, which
mean to change what a function does, use it.
"""

from __future__ import annotations

import functools
import types
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.jit._builtins import _find_builtin, _register_builtin
from torch.utils._device import _device_constructors

from surefoot.core.function_hooks import Hook, add_hook, remove_hook

if TYPE_CHECKING:
    from collections.abc import Callable

    from surefoot.watch.probe_runner import ProbeRunner


@dataclass(frozen=True)
class HookedFunction:
    """A function whose calls are observed."""

    name: str
    """Its full name: `torch.optim.Optimizer.zero_grad`."""
    why: str
    """What the watcher records from its calls."""


def around(owner: Any, name: str, call: Callable[..., Any]) -> None:
    """Replace a function by `call(original, args, kwargs)`."""
    original = getattr(owner, name)
    _device_constructors()  # caches the functions that a default device affects: it must contain the originals

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(*args, **kwargs)
        return call(original, args, kwargs)

    wrapper._is_surefoots = True  # type: ignore[attr-defined]
    if isinstance(original, types.BuiltinMethodType):  # pickled by reference: it must be found under its name
        wrapper.__module__, wrapper.__qualname__ = owner.__name__, name
    setattr(owner, name, wrapper)
    for module in (torch, torch.random, torch.serialization, torch.nn.utils):  # the other names of the function
        if vars(module).get(name) is original:
            setattr(module, name, wrapper)
    builtin = _find_builtin(original)  # type: ignore[no-untyped-call]
    if builtin is not None:  # TorchScript identifies its functions by identity
        _register_builtin(wrapper, builtin)


class Hooks:
    """Adds hooks to functions for one run."""

    def __init__(self, probes: ProbeRunner) -> None:
        self._safely, self._here = probes.safely, probes.here
        self.hooked: list[HookedFunction] = []
        self._removals: list[Callable[[], Any]] = []

    def keep(self, removal: Callable[[], Any]) -> None:
        """Call something when the hooks are removed."""
        self._removals.append(removal)

    def remove(self) -> None:
        """Remove every hook: functions get their original code back, unless others hook them too."""
        while self._removals:
            self._removals.pop()()

    def around(self, owner: Any, name: str, call: Callable[..., Any]) -> None:
        """Replace a function by `call(original, args, kwargs)`."""
        around(owner, name, call)

    def after(self, owner: Any, name: str, probe: str, observe: Callable[..., None], why: str) -> None:
        """When a function has returned, call `observe(result, args, kwargs)`."""
        safely, here = self._safely, self._here

        def before(args: Any, kwargs: Any) -> Any:
            return args, kwargs

        def after(call: Any, result: Any) -> None:
            if here():
                safely(probe, observe, result, *call)

        self.add(owner, name, probe, why, before, after)

    def add(
        self,
        owner: Any,
        name: str,
        probe: str,
        why: str,
        before: Callable[[Any, Any], Any],
        after: Callable[[Any, Any], None] | None = None,
        last: Callable[[Any], None] | None = None,
        listed: str | None = None,
    ) -> None:
        """Make a function call `before(args, kwargs)`, then `after(token, result)`, and finally `last(token)`.

        The token is the result of `before`; if it is `None`, this call is not observed further. `last` is also called
        after an exception. None of them may raise.
        """
        hook = Hook(before, after, last)
        original = getattr(owner, name)
        if getattr(original, "_is_surefoots", False):  # a change of an experiment, which wraps the original
            around(owner, name, functools.partial(_call_between, hook))
        else:
            self.hook(probe, original, hook, last is not None, listed)
        self.announce(f"{_name(owner)}.{name}", why)

    def hook(self, probe: str, function: Any, hook: Hook, always: bool = False, listed: str | None = None) -> None:
        """Add a hook to a function that is not in the table of `docs/run.md`."""
        self._safely(probe, add_hook, function, hook, always, listed)
        self.keep(functools.partial(remove_hook, function, hook))

    def announce(self, name: str, why: str) -> None:
        """Add a function to the table of `docs/run.md`."""
        if name not in {held.name for held in self.hooked}:
            self.hooked.append(HookedFunction(name, why))


def _name(owner: Any) -> str:
    return f"{owner.__module__}.{owner.__qualname__}" if isinstance(owner, type) else str(owner.__name__)


def _call_between(hook: Hook, original: Any, args: Any, kwargs: Any) -> Any:
    token = hook.enter(args, kwargs)
    if token is None:
        return original(*args, **kwargs)
    try:
        return hook.leave(token, original(*args, **kwargs))
    finally:
        if hook.end is not None:
            hook.end(token)
