"""One optimizer as the watcher knows it: its settings, the numbers of its steps, and what was found wrong on the way.

The optimizer itself is never held, so that it dies when the script lets it go. Only the first eight groups of
parameters are described.
"""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch
from torch import Tensor

from surefoot.observe.readable import readable
from surefoot.watch.script_hooks import WithoutHooks, is_listening
from surefoot.watch.step_series import StepSeries


class OptimizerRecord:
    """One optimizer, weakly held."""

    def __init__(self, number: int, optimizer: torch.optim.Optimizer, where: str) -> None:
        self.number = number
        self.ref = weakref.ref(optimizer)
        self.type = type(optimizer).__name__
        self.site = where
        self.series = StepSeries()
        self.loaded_at: int | None = None
        self.loaded_age: float | None = None
        self.born_at = 0
        self.settings = [
            {key: _simple(value) for key, value in group.items() if key != "params" and _simple(value) is not None}
            for group in optimizer.param_groups[:8]
        ]
        self.leftover: list[float] = []
        self.zeroed_before_step = 0
        self.zero_site = ""
        self.looked = 0
        self.lines: set[int] = set()
        """The lines of `backward` whose gradients it stepped with, as the stream counts them."""
        self.loss_at_start: int = 0
        """How many backwards there had been when its step began: a closure makes more inside."""
        self.row: dict[str, Any] = {}
        """The row of the step it is in."""

    def as_facts(self) -> dict[str, Any]:
        """For the run folder."""
        return {
            "number": self.number,
            "type": self.type,
            "site": self.site,
            "settings": self.settings,
            "steps": self.series.count,
            "born_at": self.born_at,
            "loaded_at": self.loaded_at,
            "loaded_age": self.loaded_age,
            "lines": sorted(self.lines),
            "zeroed_before_step": self.zeroed_before_step,
            "zero_site": self.zero_site,
            "series": self.series.as_facts(),
        }


def gradient_norm(optimizer: torch.optim.Optimizer, scale: float | None) -> Any:
    """The norm of the gradients on the first device, without the scaler's scale; a tensor where reading would wait.

    Of sharded parameters it is the norm of the part in this process: the whole would take a collective.
    """
    with WithoutHooks():
        grads = [
            local
            for group in optimizer.param_groups
            for tensor in group["params"]
            if not is_listening(tensor)
            and (grad := tensor.grad) is not None
            and (local := readable(grad)) is not None
            and local.layout is torch.strided
            and local.numel()
        ]
    if not grads:
        return None
    first = grads[0].device
    if any(grad.device != first for grad in grads):
        grads = [grad for grad in grads if grad.device == first]
    with WithoutHooks():
        norms = torch._foreach_norm(grads, 2.0)
        if any(norm.dtype is not torch.float32 for norm in norms):
            norms = tuple(norm.float() for norm in norms)
        total = torch.linalg.vector_norm(torch.stack(norms)) if len(norms) > 1 else norms[0]
    if first.type == "cpu":
        value = float(total)
        if value == math.inf:  # squares beyond float32 can add up to it while every entry is finite
            with WithoutHooks():
                value = math.hypot(*(float(torch.linalg.vector_norm(grad, dtype=torch.float64)) for grad in grads))
        return value / scale if scale else value
    return total / scale if scale else total


def left_share(tensors: list[Tensor]) -> float:
    """Which share of the parameters still has a gradient that is not zero."""
    with WithoutHooks():
        held = [local for t in tensors if t.grad is not None and (local := readable(t.grad)) is not None]
        return sum(bool((g != 0).any()) for g in held if g.layout is torch.strided) / max(1, len(tensors))


def _simple(value: Any) -> Any:
    if isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value)
    if isinstance(value, (tuple, list)) and all(isinstance(v, (int, float)) for v in value):
        return list(value)
    return None
