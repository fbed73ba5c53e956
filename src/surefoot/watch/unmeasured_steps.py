"""Whether the gradients of a step that is not measured (`measuring_budget`) are finite.

A non-finite value in a backward pass reaches the gradients of all layers below it, so surefoot checks the first
gradient. If the script clips by norm, that norm is sufficient, and nothing has to be computed.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from surefoot.observe.readable import readable
from surefoot.watch.script_hooks import WithoutHooks
from surefoot.watch.tensor_summary import real

if TYPE_CHECKING:
    from surefoot.watch.context import WatchContext
    from surefoot.watch.nonfinite_gradients import NonFiniteGradients
    from surefoot.watch.step_rows import SeriesRow


class UnmeasuredSteps:
    """Notes one number about each step that is not measured, and records the first that is not finite."""

    def __init__(self, context: WatchContext, nonfinite: NonFiniteGradients) -> None:
        self._context, self._state, self._nonfinite = context, context.state, nonfinite

    def begin(self, row: SeriesRow, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to make a step that is not measured."""
        if self._state.scaler.enabled:  # its overflows are counted elsewhere
            return
        clip = self._context.calls.last_clip or {}
        norm = clip.get("clip_norm")
        # A norm in fp16 overflows although the gradients are finite.
        tells = norm is not None and not (isinstance(norm, Tensor) and norm.dtype == torch.float16)
        row["first_gradient"] = None if tells else first_gradient(optimizer)

    def take(self, row: SeriesRow) -> None:
        """All numbers of a step have arrived, whether it was measured or not."""
        if "first_gradient" not in row:
            return
        largest = row.pop("first_gradient")
        number = row.get("clip_norm") if largest is None else largest
        if not isinstance(number, float) or math.isfinite(number):
            return
        row["grad_norm"] = number
        self._context.measuring.expect_trouble(self._state.steps)
        self._nonfinite.record_unmeasured(row)


def first_gradient(optimizer: torch.optim.Optimizer) -> Tensor | None:
    """The largest value of the first gradient that can be read; `None` if there is none."""
    with WithoutHooks():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                local = None if parameter.grad is None else readable(parameter.grad)
                if local is not None and local.layout is torch.strided and local.numel():
                    largest: Tensor = torch.linalg.vector_norm(real(local.detach()), math.inf)
                    return largest
    return None
