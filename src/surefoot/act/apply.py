"""Apply an optimizer step, or leave it out, with the gradients scaled on the way.

Two ways lead to the same weights:

- Folded: a fused Adam, AdamW, SGD or Adagrad takes two device tensors, `grad_scale` (it divides the gradients by it)
  and `found_inf` (1 leaves the step out, step count included). Clip, unscale and skip cost no pass over the gradients
  and no host sync.
- Plain: any other optimizer. Whether to step is known on the host by then, and the gradients are scaled in place.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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
        group["momentum"] != 0 and optimizer.state[parameter].get("momentum_buffer") is None
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    )


def folded_step(optimizer: Any, grad_scale: Tensor | None, skip: Tensor | None) -> None:
    """Step inside the kernel: divide by `grad_scale`, and change nothing where `skip` is true."""
    optimizer.grad_scale = None if grad_scale is None else grad_scale.to(torch.float32)
    optimizer.found_inf = None if skip is None else skip.to(torch.float32)
    try:
        optimizer.step()
    finally:
        del optimizer.grad_scale, optimizer.found_inf


@torch.no_grad()
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


@contextmanager
def scaled_lr(optimizer: Any, factor: float) -> Iterator[None]:
    """Multiply every learning rate for the length of one step. The schedule never sees it.

    An optimizer that finds its own (Adafactor with `lr=None`) has none to multiply.
    """
    if factor == 1.0:
        yield
        return
    before = [(group, group["lr"]) for group in optimizer.param_groups if group.get("lr") is not None]
    for group, lr in before:
        group["lr"] = lr * factor
    try:
        yield
    finally:
        for group, lr in before:
            group["lr"] = lr
