"""Applies an optimizer step, or skips it, and scales the gradients.

There are two methods with the same result:

- Folded: a fused Adam, AdamW, SGD or Adagrad takes two device tensors, `grad_scale` (it divides the gradients by it)
  and `found_inf` (1 skips the step, including the step count). Clip, unscale and skip cost no pass over the gradients
  and no host sync. While few steps are clipped, only the clip uses `clip_pass.py` instead.
- Plain: any other optimizer. By then the host knows whether to step, and the gradients are scaled in place.

Temporary changes for one step are registered with an `ExitStack` that undoes them. `StepCopy` is for optimizers that
move the parameters while they search for a step (L-BFGS): skipping a step means restoring a copy.

Non-finite settings are detected here too: a NaN learning rate reaches every weight, whatever the gradients are.
"""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from surefoot.core.save_restore import save_optimizer, save_tensors, without_repeats
from surefoot.core.without_hooks import without_gradients
from surefoot.types import OptimizerSetting

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from contextlib import ExitStack

    from surefoot.types import NamedParameter

_MISSING = object()
_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
HOOKED_STEP = Optimizer.profile_hook_step(lambda optimizer: None).__code__
"""The code of torch's wrapper around the `step` of an optimizer's class, which runs hooks."""


def own_step(kind: Any) -> Any:
    """The `step` of a class, without torch's wrapper that runs hooks.

    Torch wraps the `step` of the first class that is used, which may be a subclass that inherits it.
    """
    step = kind.step
    return step.__wrapped__ if getattr(step, "__code__", None) is HOOKED_STEP else step


def has_torchs_step(optimizer: Any) -> bool:
    """Whether `step` is torch's own, which does nothing without gradients."""
    step = own_step(type(optimizer))
    kinds = (kind for kind in type(optimizer).__mro__ if kind.__module__.startswith("torch.optim."))
    return any(step is own_step(kind) for kind in kinds if hasattr(kind, "step"))


def can_fold(optimizer: Any) -> bool:
    """Whether the optimizer's own kernel takes `grad_scale` and `found_inf`.

    Only torch's own `step` is known to; a subclass with another one uses the plain method. So do DTensor parameters,
    whose kernels refuse plain tensors, and parameters on several devices.
    """
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    step = own_step(type(optimizer))
    if not any(step is own_step(cls) for cls in _FUSED if isinstance(optimizer, cls)):
        return False
    if not all(group.get("fused") for group in optimizer.param_groups):
        return False
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return len({p.device for p in parameters}) == 1 and not any(hasattr(p, "to_local") for p in parameters)


def lacks_momentum(optimizer: Any) -> bool:
    """Whether a fused SGD is about to create its momentum buffers.

    It allocates them uninitialised, and the kernel fills them, but not if it skips the step: the next step would add
    the arbitrary content of the memory.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return False
    return any(
        group["momentum"] != 0 and optimizer.state.get(parameter, {}).get("momentum_buffer") is None
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    )


class OuterScaling(NamedTuple):
    """What other code has set on a fused optimizer for the next step."""

    scale: Tensor | None = None
    """The divisor that the optimizer will apply to the gradients: a loss scale."""
    found_inf: Tensor | None = None
    """Not zero if the optimizer must skip the step."""
    is_loss_scale: bool = False
    """Whether it comes from a loss scaler, so that a non-finite gradient is an overflow."""


NO_OUTER_SCALING = OuterScaling()
_SET_BY_GUARD: dict[int, OuterScaling] = {}
"""For optimizers inside a step: the `grad_scale` that a guard has set, without the factor of the clipper."""
_GUARDED_TWICE: dict[int, weakref.ref[Any]] = {}
"""Optimizers on which a second guard has measured between the first one's preparation and the step."""


def outer_scaling(optimizer: Any) -> OuterScaling:
    """The values that a `GradScaler`, or another guard, has set for the step of a fused optimizer."""
    scale, found_inf = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
    if scale is None and found_inf is None:
        return NO_OUTER_SCALING
    number = id(optimizer)
    others = _SET_BY_GUARD.get(number)
    if others is not None:
        _GUARDED_TWICE[number] = weakref.ref(optimizer, lambda _: _GUARDED_TWICE.pop(number, None))
        return others._replace(found_inf=found_inf)
    return OuterScaling(scale, found_inf, is_loss_scale=True)


def is_guarded_twice(optimizer: Any) -> bool:
    """Whether a second guard measures the gradients after the first one has prepared the step.

    It must see them unchanged after backward, so the first one must not change them.
    """
    reference = _GUARDED_TWICE.get(id(optimizer))
    return reference is not None and reference() is optimizer


def fold(
    undo: ExitStack,
    optimizer: Any,
    outer: OuterScaling,
    divide: Tensor | None,
    factor: Tensor | None,
    skip: Tensor | None,
    *,
    is_loss_scale: bool = False,
) -> None:
    """Make the optimizer's kernel divide by `divide`, multiply by `factor`, and change nothing if `skip` is true.

    `outer` is what other code has set: its scale is part of the new one, and its `found_inf` still counts. `undo`
    restores everything. `is_loss_scale` is whether a loss scale is part of `divide`.
    """
    scale = outer.scale if divide is None else divide if outer.scale is None else divide * outer.scale
    number = id(optimizer)
    if number not in _SET_BY_GUARD:
        _SET_BY_GUARD[number] = OuterScaling(scale, None, is_loss_scale or outer.is_loss_scale)
        undo.callback(_SET_BY_GUARD.pop, number, None)
    if factor is not None:
        scale = (1 if scale is None else scale) / factor
    if scale is not outer.scale:
        set_for_step(undo, optimizer, "grad_scale", None if scale is None else scale.to(torch.float32))
    if skip is not None:
        skip = skip.to(torch.float32)
        if outer.found_inf is not None:
            skip = torch.maximum(skip, outer.found_inf.to(skip))
        set_for_step(undo, optimizer, "found_inf", skip)


def set_for_step(undo: ExitStack, optimizer: Any, name: str, value: Any) -> None:
    """Set an attribute of an optimizer until `undo` is closed, unless other code has set it again by then."""
    before = vars(optimizer).get(name, _MISSING)

    def put_back() -> None:
        if vars(optimizer).get(name, _MISSING) is not value:
            return
        if before is _MISSING:
            delattr(optimizer, name)
        else:
            setattr(optimizer, name, before)

    setattr(optimizer, name, value)
    undo.callback(put_back)


def withhold_gradients(undo: ExitStack, optimizer: Any, parameters: Iterable[Tensor]) -> None:
    """Hide the gradients from a step that must not be applied, until `undo` is closed.

    Torch's optimizers then change nothing. Others may not expect a missing gradient, and get zeros: the result is
    finite, and a `StepCopy` undoes it.
    """
    if has_torchs_step(optimizer):
        _hide_gradients(undo, parameters)
    else:
        _replace_gradients(undo, parameters)


def _hide_gradients(undo: ExitStack, parameters: Iterable[Tensor]) -> None:
    hidden = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]

    def put_back() -> None:
        if any(parameter.grad is not None for parameter, _ in hidden):
            return  # the step raised, and another backward has run before `undo` was closed
        for parameter, gradient in hidden:
            parameter.grad = gradient

    for parameter, _ in hidden:
        parameter.grad = None
    undo.callback(put_back)


def _replace_gradients(undo: ExitStack, parameters: Iterable[Tensor]) -> None:
    replaced = [(each, each.grad, torch.zeros_like(each.grad)) for each in parameters if each.grad is not None]
    versions = [zeros._version for _, _, zeros in replaced]

    def put_back() -> None:
        for (parameter, gradient, zeros), version in zip(replaced, versions, strict=True):
            # An optimizer may have set its gradients to zero or `None` itself: keep that.
            if parameter.grad is zeros and zeros._version == version:
                parameter.grad = gradient

    for parameter, _, zeros in replaced:
        parameter.grad = zeros
    undo.callback(put_back)


class LearningRateCut:
    """Learning rates that are multiplied for one step. The schedule never sees it.

    An optimizer that computes its own (Adafactor with `lr=None`) has none to multiply.
    """

    def __init__(self, undo: ExitStack, optimizer: Any, factor: float) -> None:
        """Multiply every learning rate by `factor`, until `undo` is closed."""
        self._factor = factor
        self._rates: list[tuple[Any, Any, Any]] = []
        if factor != 1.0:
            groups = [group for group in optimizer.param_groups if group.get("lr") is not None]
            self._rates = [(group, group["lr"], group["lr"] * factor) for group in groups]
            for group, _, cut in self._rates:
                group["lr"] = cut
            undo.callback(self._put_back)

    def _put_back(self) -> None:
        for group, before, cut in self._rates:
            if group.get("lr") is cut:  # no other code has set it since
                group["lr"] = before

    def keep_changes(self) -> None:
        """The step has ended: if the optimizer has changed a rate itself, keep the change, without the cut."""
        for group, before, cut in self._rates:
            now = group.get("lr")
            if now is cut:
                if isinstance(cut, Tensor) and cut._version:
                    before.copy_(cut / self._factor)
            elif isinstance(now, Tensor) or isinstance(cut, Tensor):
                group["lr"] = None if now is None else now / self._factor
            elif now is not None:
                group["lr"] = before if now == cut else self._without_cut(now, before, cut)

    def _without_cut(self, now: Any, before: Any, cut: Any) -> Any:
        """A rate near the cut one was computed from it; a rate near the uncut one comes from a schedule."""
        return now / self._factor if abs(now - cut) < abs(now - before) else now


@without_gradients
def scale_gradients(gradients: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply gradients in place by one factor, or by one factor each."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, gradient in enumerate(gradients):
        groups.setdefault((gradient.device, gradient.dtype), []).append(i)
    for (device, _), members in groups.items():
        own = [without_repeats(gradients[i]) for i in members]
        if factor.ndim == 0:
            torch._foreach_mul_(own, factor.to(device))
        else:
            torch._foreach_mul_(own, [factor[i].to(device) for i in members])


# ---- copies ---------------------------------------------------------------------------------------------------------


class ClosureRefused(Exception):
    """Raised by a closure to end the optimizer's step that is being refused."""


class StepCopy:
    """Parameters, optimizer state and the settings of the groups before a step.

    Optimizers that are attributes of the optimizer (SAM, `ZeroRedundancyOptimizer`) are included. An optimizer with a
    closure moves the parameters while it searches for a step, so skipping a step means going back. A copy is restored
    before its step ends or never: later, other weights may have been loaded.
    """

    def __init__(self, parameters: Sequence[NamedParameter], optimizer: Any) -> None:
        tensors = save_tensors([parameter for _, parameter in parameters])
        self._undo = (tensors, *map(save_optimizer, [optimizer, *_inside(optimizer)]))

    def restore(self) -> None:
        """Restore everything, bit for bit."""
        for put_back in self._undo:
            put_back()


def _inside(optimizer: Any) -> list[Optimizer]:
    """The optimizers that an optimizer passes its parameters to."""
    found: list[Optimizer] = []
    waiting = [optimizer]
    while waiting:
        held = (getattr(waiting.pop(), "__dict__", {})).values()
        nested = [each for value in held for each in (value if isinstance(value, (list, tuple)) else [value])]
        new = [each for each in nested if isinstance(each, Optimizer) and not any(each is one for one in found)]
        found += [each for each in new if each is not optimizer]
        waiting += [each for each in new if each is not optimizer]
    return found


# ---- non-finite settings --------------------------------------------------------------------------------------------

SETTINGS = (
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
"""The settings that are checked: those that enter the update of torch's optimizers.

Others may be infinite on purpose: Prodigy's `growth_rate`, the `step_sizes` of Rprop.
"""


class SettingsOfStep(NamedTuple):
    """The non-finite values in the settings of the next step."""

    broken: tuple[OptimizerSetting, ...] = ()
    """The settings known on the host to be non-finite."""
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
    """The settings of a step. With `on_device`, nothing is read from a device."""
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
    """Whether all settings are plain finite numbers, which is nearly always so; takes about a microsecond."""
    total = 0.0
    for value in map(group.get, SETTINGS):
        kind = type(value)
        if kind is float:
            total += value  # type: ignore[operator]
        elif kind is tuple and len(value) == 2 and type(value[0]) is type(value[1]) is float:  # type: ignore[arg-type,index]
            total += value[0] + value[1]  # type: ignore[index]
        elif value is not None and kind is not int:
            return False
    return total - total == 0.0  # a sum with a NaN or an infinity minus itself is not 0


def _numbers(group: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The numeric settings of a group, by name; those in a tuple one by one."""
    for key in SETTINGS:
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
