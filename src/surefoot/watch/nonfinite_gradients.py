"""Records the first gradients of a run that are not finite: which parameters have them, and which do not.

They are found before the step, when the backward that made them is known; when the numbers of the step arrive, on a GPU
some steps later; or through the single number of a step that is not measured (`UnmeasuredSteps`).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from surefoot.observe.readable import readable
from surefoot.observe.tensors import dense_views
from surefoot.record.facts import NonFiniteGradientEvent

if TYPE_CHECKING:
    from collections.abc import Callable

    from surefoot.types import StepRecord
    from surefoot.watch.context import WatchContext
    from surefoot.watch.step_rows import SeriesRow


class NonFiniteGradients:
    """Records the first gradients that are not finite, unless a gradient scaler handles them."""

    def __init__(self, context: WatchContext) -> None:
        self._state, self._registry = context.state, context.registry
        self._events, self._losses = context.events, context.losses
        self._is_recorded = False

    def record(self, optimizer: torch.optim.Optimizer) -> None:
        """Record those among the current gradients of the optimizer."""
        if self._is_recorded or self._state.scaler.enabled:
            return
        self._is_recorded = True
        bad: list[str] = []
        good: list[str] = []
        for group in optimizer.param_groups:
            for tensor in group["params"]:
                if tensor.grad is None:
                    continue
                name = self._registry.label(self._registry.add(tensor))
                local = readable(tensor.grad)
                is_finite = local is None or bool(torch.isfinite(dense_views([local])[0]).all())
                (good if is_finite else bad).append(name)
        sampled = self._state.sampled
        self._events.add(
            NonFiniteGradientEvent(
                step=self._state.steps,
                parameters=bad[:20],
                finite=good[:20],
                loss_finite=all(math.isfinite(float(value)) for value in self._losses.values),
                node=sampled.nonfinite_node() if sampled is not None else None,
            )
        )

    def record_late(self, at: int, step: StepRecord, label: Callable[[str], str]) -> None:
        """Record those of a step whose numbers have arrived: its counts are known, its backward is not."""
        layers = step.signals.layers
        if self._is_recorded or self._state.scaler.enabled or layers is None:
            return
        self._is_recorded = True
        counts = layers.nonfinite_counts()
        good = [name for name in layers.names if name not in counts]
        loss = step.signals.loss
        self._events.add(
            NonFiniteGradientEvent(
                step=at,
                parameters=[label(number) for number in list(counts)[:20]],
                finite=[label(number) for number in good[:20]],
                loss_finite=loss is None or math.isfinite(loss),
            )
        )

    def record_unmeasured(self, row: SeriesRow) -> None:
        """Record a step of which only the row is known."""
        if self._is_recorded:
            return
        self._is_recorded = True
        loss = row.get("loss")
        is_finite = not isinstance(loss, float) or math.isfinite(loss)
        self._events.add(NonFiniteGradientEvent(step=row["at"], parameters=[], finite=[], loss_finite=is_finite))
