"""torch's own clipping, bit for bit, without its one trap: a norm that is NaN or Inf is not multiplied into anything.

For callers that clip with `torch.nn.utils` and whose healthy steps must stay exactly what they were. Nothing waits for
the device, except for clipping by value.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from surefoot.act.clip import limit_factor

if TYPE_CHECKING:
    from collections.abc import Sequence


@torch.no_grad()
def clip_grad_norm(
    parameters: Sequence[Tensor], max_norm: float, norm_type: float = 2.0
) -> tuple[Tensor, Tensor | None]:
    """Clip gradients in place like `torch.nn.utils.clip_grad_norm_`, unless their norm is not finite.

    Returns the norm before clipping, and what the gradients were multiplied by; `None` if nothing is to be clipped
    (`max_norm` is infinite, as of callers that only want the norm).
    """
    clipped = [parameter for parameter in parameters if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm([each.grad for each in clipped if each.grad is not None], norm_type)
    if not clipped or math.isinf(max_norm):
        return norm, None
    # A norm of 0 gives the factor 1.
    torch.nn.utils.clip_grads_with_norm_(clipped, max_norm, torch.where(torch.isfinite(norm), norm, 0.0))
    return norm, limit_factor(norm, max_norm)


@torch.no_grad()
def clip_grad_value(parameters: Sequence[Tensor], clip_value: float) -> None:
    """Clip gradients in place like `torch.nn.utils.clip_grad_value_`, unless one is not finite.

    That function turns an infinite entry into an ordinary one, so that nobody can see it any more. Waits for the
    device once.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return
    if math.isfinite(torch.nn.utils.get_total_norm(gradients, math.inf).item()):
        torch.nn.utils.clip_grad_value_(parameters, clip_value)
