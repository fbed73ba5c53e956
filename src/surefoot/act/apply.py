"""Apply an optimizer step, or leave it out, with the gradients scaled on the way.

Two ways lead to the same weights:

- Folded: a fused Adam, AdamW, SGD or Adagrad takes two device tensors, `grad_scale` (it divides the gradients by it)
  and `found_inf` (1 leaves the step out, step count included). Clip, unscale and skip cost no pass over the gradients
  and no host sync. While few steps are clipped, the clip alone goes through `clip_pass.py` instead.
- Plain: any other optimizer. Whether to step is known on the host by then, and the gradients are scaled in place.

What is changed for the length of one step is registered with an `ExitStack` that puts it back. `StepCopy` is for
optimizers that move the parameters while they look for a step (L-BFGS): leaving a step out means restoring a copy.

Settings that are not finite are found here too: a NaN learning rate reaches every weight, whatever the gradients are.
"""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from surefoot.core.gradient_mode import without_gradients
from surefoot.core.save_restore import save_optimizer, save_tensors, without_repeats
from surefoot.types import OptimizerSetting

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from contextlib import ExitStack

    from surefoot.types import NamedParameter

_MISSING = object()
_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
HOOKED_STEP = Optimizer.profile_hook_step(lambda optimizer: None).__code__
"""The code of what torch puts around the `step` of an optimizer's class to run hooks."""


def own_step(kind: Any) -> Any:
    """The `step` of a class, without what torch puts around it to run hooks.

    That is put around the `step` of the first class that is used, which may be a subclass that brings none of its own.
    """
    step = kind.step
    return step.__wrapped__ if getattr(step, "__code__", None) is HOOKED_STEP else step


def has_torchs_step(optimizer: Any) -> bool:
    """Whether `step` is torch's own, which does nothing where there is no gradient."""
    step = own_step(type(optimizer))
    kinds = (kind for kind in type(optimizer).__mro__ if kind.__module__.startswith("torch.optim."))
    return any(step is own_step(kind) for kind in kinds if hasattr(kind, "step"))


def can_fold(optimizer: Any) -> bool:
    """Whether the optimizer's own kernel takes `grad_scale` and `found_inf`.

    Only torch's own `step` is known to; a subclass that brings another one gets the plain way. So do DTensor
    parameters, whose kernels refuse plain tensors beside them, and parameters on several devices.
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
    """Whether a fused SGD is about to make its momentum buffers.

    It allocates them unfilled and lets the kernel fill them, which a kernel that is told to leave the step out does
    not do: the next step would add whatever the memory held.
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
    """What others have put on a fused optimizer for the step that is about to be taken."""

    scale: Tensor | None = None
    """What the optimizer will divide the gradients by: a loss scale."""
    found_inf: Tensor | None = None
    """Not zero where the optimizer has been told to leave the step out."""
    is_loss_scale: bool = False
    """Whether it comes from a loss scaler, so that a gradient which is not finite is an overflow."""


NO_OUTER_SCALING = OuterScaling()
_SET_BY_GUARD: dict[int, OuterScaling] = {}
"""For optimizers that are inside a step: what a guard has set `grad_scale` to, without the factor of the clipper."""
_GUARDED_TWICE: dict[int, weakref.ref[Any]] = {}
"""Optimizers on which a second guard has measured between the first one's preparation and the step."""


def outer_scaling(optimizer: Any) -> OuterScaling:
    """What a `GradScaler`, or another guard, has set for the step of a fused optimizer."""
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

    It is to see them as backward left them, so the first one must not change them.
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
    """Let the optimizer's kernel divide by `divide`, multiply by `factor`, and change nothing where `skip` is true.

    `outer` is what others have set: their scale is part of the new one, and their `found_inf` still counts. `undo` puts
    everything back as it was. `is_loss_scale` says whether a loss scale is part of `divide`.
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
    """Set an attribute of an optimizer until `undo` is closed, unless somebody else has set it again by then."""
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
    """Let a step that must not be applied find no gradients, until `undo` is closed.

    An optimizer of torch's then leaves everything as it is. Others may not expect a missing gradient, and get zeros:
    what they do with those is finite, and is undone by a `StepCopy`.
    """
    if has_torchs_step(optimizer):
        _hide_gradients(undo, parameters)
    else:
        _replace_gradients(undo, parameters)


def _hide_gradients(undo: ExitStack, parameters: Iterable[Tensor]) -> None:
    hidden = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]

    def put_back() -> None:
        if any(parameter.grad is not None for parameter, _ in hidden):
            return  # the step raised, and another backward has come before `undo` was closed
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
            # An optimizer that has set its gradients to zero or to `None` by itself wants them so.
            if parameter.grad is zeros and zeros._version == version:
                parameter.grad = gradient

    for parameter, _, zeros in replaced:
        parameter.grad = zeros
    undo.callback(put_back)


class LearningRateCut:
    """Learning rates that are multiplied for the length of one step. The schedule never sees it.

    An optimizer that finds its own (Adafactor with `lr=None`) has none to multiply.
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
            if group.get("lr") is cut:  # nobody has set another one since
                group["lr"] = before

    def keep_changes(self) -> None:
        """The step is over: where the optimizer has changed a rate itself, the change stays, without the cut."""
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
        """A rate near the one that was cut was computed from it; one near the uncut comes from a schedule."""
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
    """Parameters, optimizer state and the settings of the groups as they were before a step.

    Optimizers that are attributes of the optimizer (SAM, `ZeroRedundancyOptimizer`) are part of it. An optimizer with a
    closure moves the parameters while it looks for a step, so leaving a step out means going back. A copy is restored
    before its step ends or never: later, other weights may have been loaded.
    """

    def __init__(self, parameters: Sequence[NamedParameter], optimizer: Any) -> None:
        tensors = save_tensors([parameter for _, parameter in parameters])
        self._undo = (tensors, *map(save_optimizer, [optimizer, *_inside(optimizer)]))

    def restore(self) -> None:
        """Put everything back, bit for bit."""
        for put_back in self._undo:
            put_back()


def _inside(optimizer: Any) -> list[Optimizer]:
    """The optimizers that one hands its parameters on to."""
    found: list[Optimizer] = []
    waiting = [optimizer]
    while waiting:
        held = (getattr(waiting.pop(), "__dict__", {})).values()
        nested = [each for value in held for each in (value if isinstance(value, (list, tuple)) else [value])]
        new = [each for each in nested if isinstance(each, Optimizer) and not any(each is one for one in found)]
        found += [each for each in new if each is not optimizer]
        waiting += [each for each in new if each is not optimizer]
    return found


# ---- settings that are not finite -----------------------------------------------------------------------------------

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
    for value in map(group.get, SETTINGS):
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
