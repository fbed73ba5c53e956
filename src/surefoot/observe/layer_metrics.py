"""What is measured beyond the gradients, when asked: parameter norms and the size of updates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from surefoot.errors import require
from surefoot.observe.tensors import TensorMeter, dense_views

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from surefoot.types import NamedParameter


@dataclass(frozen=True)
class LayerMetrics:
    """What to measure per layer beyond gradients, and how often."""

    parameters: bool = False
    """Norm of each parameter, and so the gradient-to-parameter ratio: one more pass over the parameters."""
    updates: bool = False
    """Norm of each applied update, and so the update-to-weight ratio: copies the parameters of a watched step."""
    every_steps: int = 1

    def __post_init__(self) -> None:
        require(self.every_steps >= 1, f"`every_steps` must be at least 1; got {self.every_steps}.")

    def due(self, step: int) -> bool:
        """Whether this step is measured."""
        return (self.parameters or self.updates) and step % self.every_steps == 0


class UpdateMeter:
    """Parameter norms before a step, and how far the step moved them."""

    def __init__(self, watch: LayerMetrics, parameters: Sequence[NamedParameter]) -> None:
        self._tensors = [parameter.detach() for _, parameter in parameters]
        self._before = [tensor.clone() for tensor in self._tensors] if watch.updates else None
        self._param_norm = TensorMeter().measure(self._tensors).norm

    @torch.no_grad()
    def columns(self) -> dict[str, Tensor]:
        """The norms, and if watched those of what the step did; call after it."""
        if self._before is None:
            return {"param_norm": self._param_norm}
        moved = [a - b for a, b in zip(dense_views(self._tensors), dense_views(self._before), strict=True)]
        return {"param_norm": self._param_norm, "update_norm": TensorMeter().measure(moved).norm}
