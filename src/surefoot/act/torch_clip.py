"""Torch's own clipping, bit for bit, except that a non-finite norm is not multiplied into anything.

For callers that clip with `torch.nn.utils` and whose healthy steps must stay exactly the same. Nothing waits for the
device. Clipping by value is torch's own: it makes an infinite entry finite, so `any_nonfinite` checks for one before.
"""

from __future__ import annotations

import math
from operator import attrgetter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence


@torch.no_grad()
def norm_and_factor(
    parameters: Sequence[Tensor], max_norm: float, norm_type: float = 2.0
) -> tuple[Tensor, Tensor | None]:
    """The norm of the gradients, and the factor of `clip_grad_norm`.

    The factor is `None` if nothing is clipped (`max_norm` is infinite, as for callers that only need the norm).
    """
    return _measured(_gradients(parameters), max_norm, norm_type)


def _gradients(parameters: Sequence[Tensor]) -> list[Tensor]:
    return [gradient for parameter in parameters if (gradient := parameter.grad) is not None]


def _measured(gradients: list[Tensor], max_norm: float, norm_type: float) -> tuple[Tensor, Tensor | None]:
    norm = torch.nn.utils.get_total_norm(gradients, norm_type)
    return norm, None if not gradients or math.isinf(max_norm) else _factor(norm, max_norm)


def _factor(norm: Tensor, max_norm: float) -> Tensor:
    """Torch's factor for a norm; that of a norm of 0, which is 1, if it is not finite."""
    return torch.clamp(max_norm / (_finite(norm) + 1e-6), max=1.0)


def _finite(norm: Tensor) -> Tensor:
    return torch.nan_to_num(norm, nan=0.0, posinf=0.0)  # a norm is not negative


@torch.no_grad()
def clip_grad_norm(
    parameters: Sequence[Tensor], max_norm: float, norm_type: float = 2.0
) -> tuple[Tensor, Tensor | None]:
    """Clip gradients in place like `torch.nn.utils.clip_grad_norm_`, unless their norm is not finite.

    Returns the norm before clipping and the factor, like `norm_and_factor`.
    """
    gradients = _gradients(parameters)
    norm, factor = _measured(gradients, max_norm, norm_type)
    if factor is not None:
        same = [set(map(kind, gradients)) for kind in (type, Tensor.get_device, attrgetter("dtype"))]
        if same[0] == {Tensor} and all(len(kinds) == 1 for kinds in same):
            torch._foreach_mul_(gradients, factor)  # as torch does, which would compute the factor again
        else:
            given = [parameter for parameter in parameters if parameter.grad is not None]
            torch.nn.utils.clip_grads_with_norm_(given, max_norm, _finite(norm))
    return norm, factor


@torch.no_grad()
def any_nonfinite(gradients: Sequence[Tensor]) -> Tensor:
    """Whether an entry of some gradients is NaN or Inf: a flag on their device. Does not wait."""
    return ~torch.isfinite(torch.nn.utils.get_total_norm(gradients, math.inf))
