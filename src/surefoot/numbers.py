"""One step's numbers as a single vector on the device, and the record it becomes on the host.

Head, flags of the step rules, the user's own tensors, then the per-layer columns: one copy brings all of it over.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from surefoot.observe.readings import Reading, begin_reading
from surefoot.types import Layers, Signals, StepRecord

if TYPE_CHECKING:
    from collections.abc import Sequence

_HEAD = ("loss", "grad_norm", "nonfinite", "clip_factor", "loss_scale")
_LAYER_COLUMNS = ("grad_norm", "grad_largest", "nonfinite", "param_norm", "update_norm")


@dataclass(frozen=True)
class Judgement:
    """Whether a step is to be left out, and why: tensors on the device, or bools on the host."""

    skip: Any
    overflow: Any
    flags: Sequence[Any]
    """One per step rule."""
    rules: tuple[str, ...]
    """What the step rules are called."""


class StepNumbers:
    """What became of one step; read on demand, once."""

    def __init__(self, read: StepRecord | _Arriving) -> None:
        self._read = read

    def record(self) -> StepRecord:
        """The record on the host. Waits for the device if the numbers have not arrived."""
        if not isinstance(self._read, StepRecord):
            self._read = self._read.record()
        return self._read


def collect(signals: Signals, judged: Judgement) -> StepNumbers:
    """Bring a step's numbers to the host: at once if they are there, else by one asynchronous copy."""
    if signals.device is None:
        record = StepRecord(signals, bool(judged.skip), _reasons(judged, judged.flags), bool(judged.overflow))
        return StepNumbers(record)
    return StepNumbers(_Arriving(signals, judged))


def _reasons(judged: Judgement, flags: Sequence[Any]) -> tuple[str, ...]:
    return tuple(name for name, flag in zip(judged.rules, flags, strict=True) if flag)


class _Arriving:
    """A step whose numbers are on their way."""

    def __init__(self, signals: Signals, judged: Judgement) -> None:
        device = signals.device
        assert device is not None
        self._signals, self._judged = signals, judged
        self._heads = [name for name in _HEAD if isinstance(getattr(signals, name), Tensor)]
        self._own = [name for name, value in signals.extra.items() if isinstance(value, Tensor)]
        scalars = [getattr(signals, name) for name in self._heads] + [signals.extra[name] for name in self._own]
        flags = [judged.skip, judged.overflow, *judged.flags]
        parts = [torch.stack([value.detach().to(device, torch.float32) for value in [*flags, *scalars]])]
        layers = signals.layers
        self._columns = [name for name in _LAYER_COLUMNS if layers is not None and getattr(layers, name) is not None]
        parts += [getattr(layers, name).to(torch.float32) for name in self._columns]
        self._reading: Reading = begin_reading(torch.cat(parts))

    def record(self) -> StepRecord:
        vector = self._reading.wait()
        flag_count, layers = len(self._judged.flags), self._signals.layers
        scalar_count = 2 + flag_count + len(self._heads) + len(self._own)
        skip, overflow, *rest = vector[:scalar_count].tolist()
        flags, scalars = rest[:flag_count], rest[flag_count:]
        head = dict(zip(self._heads, scalars, strict=False))
        own = dict(zip(self._own, scalars[len(self._heads) :], strict=True))
        if layers is not None:
            table = vector[scalar_count:].view(len(self._columns), len(layers.names))
            layers = replace(layers, **dict(zip(self._columns, table, strict=True)))
        signals: Signals = replace(self._signals, **head, extra={**self._signals.extra, **own}, layers=layers)
        return StepRecord(signals, skip > 0, _reasons(self._judged, flags), overflow > 0)


def layers_of(named: Sequence[Any], norm: Tensor, largest: Tensor, nonfinite: Tensor, **more: Tensor | None) -> Layers:
    """Per-layer statistics under the parameters' names."""
    return Layers(
        tuple(name for name, _ in named),
        tuple(parameter.ndim for _, parameter in named),
        norm,
        largest,
        nonfinite,
        **more,
    )
