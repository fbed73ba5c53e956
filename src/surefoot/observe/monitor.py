"""`GradientMonitor`: per-layer statistics for any loop, without the stabilizer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from surefoot.core.device_copies import AsyncCopy, begin_reading
from surefoot.errors import UsageError
from surefoot.observe.parameters import named_parameters
from surefoot.observe.tensors import TensorMeter, dense_views, total_norm
from surefoot.types import LayerStats, NamedParameter, format_number

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class GradientReport:
    """Statistics of one step; reading them waits for the device once, making them does not."""

    names: tuple[str, ...]
    ranks: tuple[int, ...]
    columns: tuple[str, ...]
    reading: AsyncCopy

    @property
    def layers(self) -> LayerStats:
        """Per layer: gradient norm, largest value, non-finite count, parameter norm, update norm."""
        table = self.reading.wait().view(len(self.columns), len(self.names))
        return LayerStats(self.names, self.ranks, **dict(zip(self.columns, table, strict=True)))

    @property
    def total_norm(self) -> float:
        """Global gradient norm; NaN if any entry is not finite."""
        return float(total_norm(self.layers.grad_norm))

    @property
    def total_param_norm(self) -> float:
        """Norm of all parameters that have a gradient."""
        param_norm = self.layers.param_norm
        assert param_norm is not None
        return float(total_norm(param_norm))

    @property
    def total_ratio(self) -> float:
        """Global gradient norm over the norm of the parameters that have a gradient; Inf if all of these are zero."""
        return _ratio(self.total_norm, self.total_param_norm)

    def __str__(self) -> str:
        totals = {
            "gradient norm": self.total_norm,
            "parameter norm": self.total_param_norm,
            "their ratio": self.total_ratio,
        }
        head = ", ".join(f"{name} {format_number(value)}" for name, value in totals.items())
        return f"total {head}\n{self.layers}"


class UpdateRatios(dict[str, float]):
    """Update-to-weight ratio of each parameter, by name: the size of its change relative to its norm before."""

    def __init__(self, ratios: dict[str, float], total: float) -> None:
        super().__init__(ratios)
        self.total = total
        """The ratio of all parameters together."""


class GradientMonitor:
    """Measures gradients, parameters and updates of a model in one pass each.

    Call `observe()` after backward. To measure updates too, call `before_step()` before the step and `observe_update()`
    after it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._named = named_parameters([model])
        self._meter = TensorMeter()
        self._before: list[Tensor] | None = None

    @torch.no_grad()
    def observe(self) -> GradientReport:
        """Measure the current gradients and parameters."""
        named = self._with_gradient()
        gradients = [parameter.grad for _, parameter in named]
        measured = self._meter.measure([gradient for gradient in gradients if gradient is not None])
        grad_norm, grad_largest, nonfinite = measured.columns()
        param_norm = TensorMeter().measure([parameter for _, parameter in named]).norm
        return self._report(
            named, grad_norm=grad_norm, grad_largest=grad_largest, nonfinite=nonfinite, param_norm=param_norm
        )

    @torch.no_grad()
    def before_step(self) -> None:
        """Copy the parameters, to measure the change in the next step."""
        self._before = [parameter.detach().clone() for _, parameter in self._named]

    @torch.no_grad()
    def observe_update(self) -> UpdateRatios:
        """Update-to-weight ratio per parameter and in total, after the step. Call `before_step()` before it."""
        if self._before is None:
            raise UsageError("call `before_step()` before the step: `observe_update()` has nothing to compare with.")
        before, self._before = self._before, None
        now = dense_views([parameter.detach() for _, parameter in self._named])
        moved = [after - old for after, old in zip(now, dense_views(before), strict=True)]
        weight = TensorMeter().measure(before).norm
        update = TensorMeter().measure(moved).norm
        *ratios, moved_total, weight_total = torch.cat(
            [update / weight, total_norm(update)[None], total_norm(weight)[None]]
        ).tolist()
        names = [name for name, _ in self._named]
        return UpdateRatios(dict(zip(names, ratios, strict=True)), _ratio(moved_total, weight_total))

    def _with_gradient(self) -> list[NamedParameter]:
        found = []
        for name, parameter in self._named:
            if parameter.grad is None:
                continue
            found.append(NamedParameter(name, parameter))
        if not found:
            raise UsageError("no parameter of the model has a gradient: call `observe()` after backward.")
        return found

    @staticmethod
    def _report(named: list[NamedParameter], **columns: Tensor) -> GradientReport:
        home = named[0].parameter.device
        vector = torch.cat([column.to(home, torch.float32) for column in columns.values()])
        return GradientReport(
            tuple(name for name, _ in named),
            tuple(parameter.ndim for _, parameter in named),
            tuple(columns),
            begin_reading(vector),
        )


def _ratio(part: float, whole: float) -> float:
    """The quotient with the rules of tensors: Inf or NaN if the divisor is zero."""
    if whole:
        return part / whole
    return math.inf if part > 0 else math.nan
