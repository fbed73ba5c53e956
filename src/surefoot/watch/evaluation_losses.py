"""The losses of evaluation passes, each averaged over its rows: the points of a validation curve.

`patches.losses` reports every call of torch's loss functions without gradients. Calls between two training steps in one
block without gradients form a pass. If each batch has its own block, all calls between the two steps form one. A call
between a loss with gradients and the backward over it is part of a training step, and no evaluation: the loss before
the inner updates of meta-learning rises as it should. Losses on a device are accumulated there and read when the facts
are collected: nothing waits for them.

Not covered: losses written by hand, losses that are not scalars, and functions inside compiled code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from surefoot.core.weak_reference import weak_reference
from surefoot.core.without_hooks import WithoutHooks
from surefoot.observe.readable import is_readable
from surefoot.record.facts import EvaluationPass
from surefoot.watch.deferred import READ_AT_ONCE, number, read_each

if TYPE_CHECKING:
    from collections.abc import Callable

    from surefoot.watch.evaluation import Evaluations
    from surefoot.watch.watch_state import WatchState

MOST_PASSES = 2_000
"""If there are more passes, only those of every second step are kept."""
MOST_SETS = 4
"""More than this many blocks with one call each, between two steps, are the batches of one pass."""


@dataclass
class _LossBlock:
    """The calls of one loss function in one block without gradients."""

    number: int
    function: str
    total: float | Tensor = 0.0
    rows: int = 0
    calls: int = 0

    def add(self, loss: float | Tensor, rows: int) -> None:
        self.total = self.total + loss * rows
        self.rows += rows
        self.calls += 1


class EvaluationLosses:
    """Sums the losses between two steps, and keeps the passes of earlier ones."""

    def __init__(self, state: WatchState, evaluations: Evaluations) -> None:
        self._state, self._evaluations = state, evaluations
        self._step = 0
        self._blocks: list[_LossBlock] = []
        self._passes: list[EvaluationPass] = []
        self._last: Callable[[], object | None] = _no_tensor
        self._trained_on: tuple[int, int] | None = None
        """The steps and backwards before the last call with gradients."""

    def note_training(self) -> None:
        """A loss function is called with gradients."""
        self._trained_on = (self._state.steps, self._state.backwards)

    def take(self, function: str, given: object, result: object, is_sum: bool) -> None:
        """A loss function has returned, without gradients; `given` is the predictions."""
        if not isinstance(result, Tensor) or not isinstance(given, Tensor) or result is self._last():
            return  # a function mode calls the function twice
        if self._trained_on == (self._state.steps, self._state.backwards):
            return
        with WithoutHooks():
            if result.dim() or not result.is_floating_point() or not given.dim() or not is_readable(result):
                return
            self._last = weak_reference(result)
            rows = given.shape[0]
            loss = result.detach()
            value = loss.item() if loss.device.type in READ_AT_ONCE else loss.float()
            if rows:
                self._block(function).add(value / rows if is_sum else value, rows)

    def _block(self, function: str) -> _LossBlock:
        if self._state.steps != self._step:
            self._finish()
            self._step = self._state.steps
        number = self._evaluations.opened
        if not self._blocks or (self._blocks[-1].number, self._blocks[-1].function) != (number, function):
            self._blocks.append(_LossBlock(number, function))
        return self._blocks[-1]

    def _finish(self) -> None:
        """Keep the passes since the last step."""
        self._passes += self._now()
        self._blocks = []
        if len(self._passes) > MOST_PASSES:
            steps = sorted({each.step for each in self._passes})
            kept = set(steps[::2])
            self._passes = [each for each in self._passes if each.step in kept]

    def _now(self) -> list[EvaluationPass]:
        """The passes since the last step."""
        blocks = self._blocks
        if len(blocks) > MOST_SETS and all(block.calls == 1 for block in blocks):
            merged: dict[str, _LossBlock] = {}
            for block in blocks:
                merged.setdefault(block.function, _LossBlock(0, block.function)).add(
                    block.total / block.rows, block.rows
                )
            blocks = list(merged.values())
        with WithoutHooks():
            return [
                EvaluationPass(
                    step=self._step,
                    number=i,
                    function=block.function,
                    loss=number(block.total / block.rows)
                    if isinstance(block.total, Tensor)
                    else block.total / block.rows,
                    rows=block.rows,
                    calls=block.calls,
                )
                for i, block in enumerate(blocks)
            ]

    def as_facts(self) -> list[EvaluationPass]:
        """All passes so far. All numbers are read."""
        self._passes = read_each(self._passes)
        return [*self._passes, *read_each(self._now())]


def _no_tensor() -> None:
    return None
