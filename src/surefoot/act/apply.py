"""Apply an optimizer step, or leave it out, with the gradients scaled on the way.

Two ways lead to the same weights:

- Folded: a fused Adam, AdamW, SGD or Adagrad takes two device tensors, `grad_scale` (it divides the gradients by it)
  and `found_inf` (1 leaves the step out, step count included). Clip, unscale and skip cost no pass over the gradients
  and no host sync.
- Plain: any other optimizer. Whether to step is known on the host by then, and the gradients are scaled in place.

What is changed for the length of one step is registered with an `ExitStack` that puts it back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from surefoot.core.gradient_mode import without_gradients

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from contextlib import ExitStack

_MISSING = object()
_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)


def can_fold(optimizer: Any) -> bool:
    """Whether the optimizer's own kernel takes `grad_scale` and `found_inf`.

    Only torch's own `step` is known to; a subclass that brings another one gets the plain way. So do DTensor
    parameters, whose kernels refuse plain tensors beside them, and parameters on several devices.
    """
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    if not any(type(optimizer).step is cls.step for cls in _FUSED if isinstance(optimizer, cls)):
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
_SET_BY_GUARD: WeakKeyDictionary[Any, Tensor | None] = WeakKeyDictionary()
"""Optimizers on which a guard has set `grad_scale`, with the part of it that is a loss scale or a divisor."""


def outer_scaling(optimizer: Any) -> OuterScaling:
    """What a `GradScaler`, or another guard, has set for the step of a fused optimizer."""
    scale, found_inf = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
    if scale is None and found_inf is None:
        return NO_OUTER_SCALING
    if optimizer in _SET_BY_GUARD:
        scale = _SET_BY_GUARD[optimizer]
        return OuterScaling(scale, found_inf, is_loss_scale=scale is not None)
    return OuterScaling(scale, found_inf, is_loss_scale=True)


def fold(
    undo: ExitStack,
    optimizer: Any,
    outer: OuterScaling,
    divide: Tensor | None,
    factor: Tensor | None,
    skip: Tensor | None,
) -> None:
    """Let the optimizer's kernel divide by `divide`, multiply by `factor`, and change nothing where `skip` is true.

    `outer` is what others have set: their scale is part of the new one, and their `found_inf` still counts. `undo` puts
    everything back as it was.
    """
    scale = outer.scale if divide is None else divide if outer.scale is None else divide * outer.scale
    if optimizer not in _SET_BY_GUARD:
        _SET_BY_GUARD[optimizer] = scale
        undo.callback(_SET_BY_GUARD.pop, optimizer, None)
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


def hide_gradients(undo: ExitStack, parameters: Iterable[Tensor]) -> None:
    """Take the gradients away until `undo` is closed: an optimizer of torch's then leaves everything as it is."""
    hidden = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]

    def put_back() -> None:
        if any(parameter.grad is not None for parameter, _ in hidden):
            return  # the step raised, and another backward has come before `undo` was closed
        for parameter, gradient in hidden:
            parameter.grad = gradient

    for parameter, _ in hidden:
        parameter.grad = None
    undo.callback(put_back)


def scale_lr(undo: ExitStack, optimizer: Any, factor: float) -> None:
    """Multiply every learning rate until `undo` is closed. The schedule never sees it.

    An optimizer that finds its own (Adafactor with `lr=None`) has none to multiply.
    """
    if factor == 1.0:
        return
    before = [(group, group["lr"]) for group in optimizer.param_groups if group.get("lr") is not None]

    def put_back() -> None:
        for group, lr in before:
            group["lr"] = lr

    for group, lr in before:
        group["lr"] = lr * factor
    undo.callback(put_back)


@without_gradients
def scale_gradients(gradients: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply gradients in place by one factor, or by one factor each."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, gradient in enumerate(gradients):
        groups.setdefault((gradient.device, gradient.dtype), []).append(i)
    for (device, _), members in groups.items():
        own = [gradients[i] for i in members]
        if factor.ndim == 0:
            torch._foreach_mul_(own, factor.to(device))
        else:
            torch._foreach_mul_(own, [factor[i].to(device) for i in members])
