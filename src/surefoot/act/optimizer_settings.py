"""Settings of an optimizer that are not finite: a NaN learning rate reaches every weight, whatever the gradients are.

Numbers on the host are looked at there. A setting that is a tensor on a device, such as the learning rate of a
capturable optimizer, is judged on the device, and its value travels to the host with the step's other numbers.

Only settings that enter the update of torch's optimizers are looked at, and only of groups that have a gradient. Others
may be infinite on purpose: Prodigy's `growth_rate`, the `step_sizes` of Rprop.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from surefoot.types import OptimizerSetting

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

NAMES = (
    "lr",
    "weight_decay",
    "betas",
    "eps",
    "momentum",
    "dampening",
    "alpha",
    "rho",
    "lambd",
    "lr_decay",
    "momentum_decay",
    "beta2_decay",
)


class SettingsOfStep(NamedTuple):
    """What was found in the settings that a step is about to be taken with."""

    broken: tuple[OptimizerSetting, ...] = ()
    """Those known on the host not to be finite."""
    places: tuple[tuple[int, str], ...] = ()
    """Group and key of those that are on a device."""
    values: Tensor | None = None
    """… and their values, one vector."""

    def all_broken(self, values: Sequence[float]) -> tuple[OptimizerSetting, ...]:
        """Every setting that is not finite, given the values of those that were on a device."""
        found = zip(self.places, values, strict=True)
        return self.broken + tuple(OptimizerSetting(*at, value) for at, value in found if not math.isfinite(value))


NOTHING_FOUND = SettingsOfStep()


def look_at_settings(optimizer: Any, home: torch.device, on_device: bool) -> SettingsOfStep:
    """The settings of a step. With `on_device` nothing is read off a device."""
    broken: list[OptimizerSetting] = []
    places: list[tuple[int, str]] = []
    tensors: list[Tensor] = []
    for index, group in enumerate(optimizer.param_groups):
        if _surely_finite(group):
            continue
        for key, value in _numbers(group):
            if not isinstance(value, Tensor):
                if not math.isfinite(value) and _has_gradient(group):
                    broken.append(OptimizerSetting(index, key, float(value)))
            elif on_device and value.device.type != "cpu":
                if _has_gradient(group):
                    places.append((index, key))
                    tensors.append(value)
            elif not math.isfinite(number := float(value)) and _has_gradient(group):
                broken.append(OptimizerSetting(index, key, number))
    if tensors:
        values = torch.stack([each.detach().to(home, torch.float32).reshape(()) for each in tensors])
        return SettingsOfStep(tuple(broken), tuple(places), values)
    return SettingsOfStep(tuple(broken)) if broken else NOTHING_FOUND


def _surely_finite(group: dict[str, Any]) -> bool:
    """Whether all settings are plain finite numbers, in a microsecond or so: nearly always the case."""
    total = 0.0
    for value in map(group.get, NAMES):
        kind = type(value)
        if kind is float:
            total += value  # type: ignore[operator]
        elif kind is tuple and len(value) == 2 and type(value[0]) is type(value[1]) is float:  # type: ignore[arg-type,index]
            total += value[0] + value[1]  # type: ignore[index]
        elif value is not None and kind is not int:
            return False
    return total - total == 0.0  # a sum with a NaN or an infinity in it has no difference to itself


def _numbers(group: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The settings of a group that may not be finite, by name, those in a tuple one by one."""
    for key in NAMES:
        value = group.get(key)
        if isinstance(value, (tuple, list)):
            yield from ((f"{key}[{i}]", each) for i, each in enumerate(value) if _is_number(each))
        elif _is_number(value):
            yield key, value


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and value.is_floating_point()
    return isinstance(value, (float, np.floating))


def _has_gradient(group: dict[str, Any]) -> bool:
    return any(parameter.grad is not None for parameter in group["params"])
