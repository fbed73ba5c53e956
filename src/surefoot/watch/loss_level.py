"""The level of the loss, and losses far above it.

Each line of the script that calls `backward` has its own level: the last forty losses that were not spikes. A loss that
stays high therefore becomes the level. After forty spikes in a run, no more are reported.

The rule differs from `detect.Spike` on purpose. That one decides whether a step is refused: it requires the gradient
norm to agree, waits for fifty steps, and accepts what occurs three times. This one has no effect on training. It marks
losses for the diagnosis, which searches for data that recurs in them, so every spike counts: also an early one, one at
a line that is called rarely, one with clipped gradients, and one that recurs each epoch.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from surefoot.record.facts import SpikeData
from surefoot.watch import autograd_graph as graph
from surefoot.watch.tensor_summary import describe

if TYPE_CHECKING:
    from torch import Tensor

MOST_SPIKES = 40


class LossLevels:
    """The level of each line, and the number of spikes."""

    def __init__(self) -> None:
        self.spikes = 0
        self._levels: dict[Any, list[float]] = {}
        self._last: list[float] = []
        self._key: Any = None
        self._began: dict[Any, float] = {}

    def is_spike(self, value: float, line: Any) -> bool:
        """Whether a loss is far above the previous ones from the same line."""
        self._key = line
        level = self._last = self._levels.setdefault(line, [])
        if len(level) < 20:
            level.append(value)
            return False
        ordered = sorted(level)
        count = len(ordered)
        middle = ordered[count // 2]
        if line not in self._began:
            self._began[line] = middle
        spread = ordered[count * 9 // 10] - ordered[count // 10]
        spike = value > middle + 6 * spread + 0.5 * abs(middle) + 1e-6
        if spike and self.spikes < MOST_SPIKES:
            self.spikes += 1
            return True
        level.append(value)
        if count >= 40:
            del level[0]
        return False

    def middle(self) -> float:
        """The level that the last loss was compared with."""
        return _middle(self._last)

    def began(self) -> float:
        """The initial loss of that line."""
        return self._began[self._key]


def _middle(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def data_under(root: Tensor) -> list[SpikeData]:
    """A few data tensors that went into a loss, each with its largest row."""
    held: list[SpikeData] = []
    for node in graph.leaves_first(root.grad_fn)[:400]:
        for name, tensor in graph.saved(node).items():
            if tensor.grad_fn is None and not tensor.requires_grad and tensor.is_floating_point() and tensor.dim():
                held.append(_spike_data(graph.op(node), name, tensor))
        if len(held) >= 4:
            break
    return held


def _spike_data(op: str, name: str, tensor: Tensor) -> SpikeData:
    summary = describe(tensor)
    facts = SpikeData(op=op, tensor=name, **{each.name: getattr(summary, each.name) for each in fields(summary)})
    if tensor.dim() <= 1:
        return facts
    rows = tensor.detach().reshape(len(tensor), -1).float().abs().amax(1)
    ratio = float(rows.max() / rows.median().clamp_min(1e-12))
    return replace(facts, worst_row=int(rows.argmax()), row_ratio=ratio)
