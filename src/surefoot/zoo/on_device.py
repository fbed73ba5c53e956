"""A script that was written for the CPU runs on another device, unmodified.

`use_device` is called once, before the script, and does what a user might write at its top. The default device is set,
which leaves five things that a script for the CPU does and that would fail or stay on the CPU:

- numbers are drawn with a generator of the CPU: they are drawn there, so they are those of a run on the CPU, and moved;
- a tensor goes to NumPy: it is copied to the host first;
- the lengths for `pack_padded_sequence` are a tensor: it wants them on the host, and gets them there;
- an array comes from NumPy: `torch.from_numpy`, which no mode sees, moves it to the device;
- `torch.autocast("cpu")` and `torch.amp.GradScaler("cpu")`: they get the device instead.

The first three belong to the mode that the default device of torch is. Watching a script is the same with it: a mode of
another kind, and a replaced method of tensors, would be the script's own, which surefoot does not interfere with. What
surefoot itself computes stays where it is, because it turns modes off.

Left out: tensors of old constructors (`torch.FloatTensor`) and what worker processes of a `DataLoader` make.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._device import DeviceContext

_TORCH = os.path.dirname(torch.__file__) + os.sep
_TO_NUMPY, _AS_ARRAY = Tensor.numpy, Tensor.__array__
_PACK: Any = torch._VF._pack_padded_sequence  # what `pack_padded_sequence` calls


class DefaultDevice(DeviceContext):
    """The default device. Functions that need the host get their tensors there, and their results come back."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _TO_NUMPY or func is _AS_ARRAY:
            return func(args[0].cpu(), *args[1:], **kwargs)
        if func is _PACK:
            return func(args[0], args[1].cpu(), *args[2:], **kwargs)
        generator = kwargs.get("generator")
        if generator is not None and generator.device.type != self.device.type:
            return self._drawn(func, args, kwargs, generator.device)
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]

    def _drawn(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], home: torch.device) -> Any:
        """What a function draws with a generator that lives elsewhere."""
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if kwargs.get("device") is not None or (tensors and all(each.device == home for each in tensors)):
            return func(*args, **kwargs)
        at_home = {id(each): each.to(home) for each in tensors}
        given = [at_home.get(id(value), value) for value in args]
        named = {name: at_home.get(id(value), value) for name, value in kwargs.items()}
        with home:  # the default device, for functions that make a tensor
            drawn = func(*given, **named)
        for each in tensors:
            if drawn is at_home[id(each)]:  # in place
                with torch.no_grad():
                    return each.copy_(drawn)
        return drawn.to(self.device)


def use_device(device: torch.device) -> None:
    """From here on, what this process makes without naming a device is made on this one."""
    torch.set_default_device(None)
    default: Any = DefaultDevice(device)
    default.__enter__()  # as `torch.set_default_device` does, which makes one of its own
    torch._GLOBAL_DEVICE_CONTEXT.device_context = default
    torch.from_numpy = _moving(torch.from_numpy, device)  # type: ignore[assignment]
    for kind in (torch.autocast, torch.amp.GradScaler):
        _make_for(kind, device.type)


def _moving(from_numpy: Callable[[Any], Tensor], device: torch.device) -> Callable[[Any], Tensor]:
    """`torch.from_numpy` that moves what it makes, unless modes are off: then surefoot calls it."""

    def moved(array: Any) -> Tensor:
        made = from_numpy(array)
        return made.to(device) if torch._C._is_torch_function_mode_enabled() else made

    return moved


def _make_for(kind: Any, device_type: str) -> None:
    """Have a class, whose first argument is the type of a device, make the script's objects for this one."""
    original = kind.__init__

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        if sys._getframe(1).f_code.co_filename.startswith(_TORCH):  # torch knows what it makes them for
            original(self, *args, **kwargs)
            return
        given = {name: value for name, value in kwargs.items() if name not in ("device", "device_type")}
        original(self, device_type, *args[1:], **given)

    kind.__init__ = made
