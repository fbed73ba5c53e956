"""One step's numbers on their way from the device to the host, and the record they become there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from surefoot.core.device import AsyncCopy, begin_reading
from surefoot.types import LayerStats, Signals, StepRecord

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from surefoot.act.optimizer_settings import SettingsOfStep
    from surefoot.guard.step_decision import StepDecision
    from surefoot.types import NamedParameter, OptimizerSetting, Scalar


class LayerNames(NamedTuple):
    """The parameters that had a gradient: their names and numbers of dimensions. Keeps none of them alive."""

    names: tuple[str, ...]
    ranks: tuple[int, ...]

    @classmethod
    def of(cls, named: Sequence[NamedParameter]) -> LayerNames:
        """Those of the given parameters."""
        return cls(tuple(name for name, _ in named), tuple(parameter.ndim for _, parameter in named))


class StepNumbers:
    """What became of one step; read on demand, once."""

    def __init__(self, source: StepRecord | Arriving) -> None:
        self._source = source

    def record(self) -> StepRecord:
        """The record on the host. Waits for the device if the numbers have not arrived."""
        if not isinstance(self._source, StepRecord):
            self._source = self._source.record()
        return self._source


def at_hand(
    judged: StepDecision,
    rules: Sequence[str],
    notices: Sequence[str],
    named: LayerNames,
    watched: Mapping[str, Tensor],
    settings: SettingsOfStep,
    **facts: Any,
) -> StepRecord:
    """The record of a step that was decided on the host."""
    layers = _layers(named, *judged.statistics, **watched)
    numbers = {name: getattr(judged, name) for name in judged.head}
    signals = Signals(layers=layers, **numbers, **facts)
    return _record(signals, judged.skip, judged.overflow, rules, notices, judged.flags, settings.all_broken(()))


class Arriving:
    """A step that was decided on the device, whose numbers are being copied."""

    def __init__(
        self,
        judged: StepDecision,
        vector: Tensor,
        rules: Sequence[str],
        notices: Sequence[str],
        named: LayerNames,
        watched: Mapping[str, Tensor],
        own: Mapping[str, Scalar],
        settings: SettingsOfStep,
        **facts: Any,
    ) -> None:
        self._head, self._flag_count = judged.head, len(judged.flags)
        self._rules, self._notices = rules, notices
        self._named, self._watched, self._facts = named, tuple(watched), facts
        self._own_floats = {name: value for name, value in own.items() if not isinstance(value, Tensor)}
        self._own_tensors = {name: value for name, value in own.items() if isinstance(value, Tensor)}
        self._settings = settings
        parts = [vector, *(column.to(vector) for column in watched.values())]
        parts += [value.to(vector).reshape(1) for value in self._own_tensors.values()]
        parts += [] if settings.values is None else [settings.values.to(vector)]
        self._reading: AsyncCopy = begin_reading(vector if len(parts) == 1 else torch.cat(parts))

    def record(self) -> StepRecord:
        """Wait for the numbers and sort them out."""
        vector = self._reading.wait()
        scalar_count = 2 + self._flag_count + len(self._head)
        skip, overflow, *rest = vector[:scalar_count].tolist()
        flags, numbers = rest[: self._flag_count], rest[self._flag_count :]
        columns, count = 3 + len(self._watched), len(self._named.names)
        end = scalar_count + columns * count
        table = vector[scalar_count:end].view(columns, count)
        rest, own_count = vector[end:].tolist(), len(self._own_tensors)
        own = self._own_floats | dict(zip(self._own_tensors, rest[:own_count], strict=True))
        settings = self._settings.all_broken(rest[own_count:])
        layers = _layers(self._named, *table[:3], **dict(zip(self._watched, table[3:], strict=True)))
        signals = Signals(layers=layers, **dict(zip(self._head, numbers, strict=True)), extra=own, **self._facts)
        return _record(signals, skip > 0, overflow > 0, self._rules, self._notices, flags, settings)


def _record(
    signals: Signals,
    skip: Any,
    overflow: Any,
    rules: Sequence[str],
    notices: Sequence[str],
    flags: Sequence[Any],
    settings: tuple[OptimizerSetting, ...],
) -> StepRecord:
    reasons = tuple(name for name, flag in zip(rules, flags[: len(rules)], strict=True) if flag)
    raised = tuple(name for name, flag in zip(notices, flags[len(rules) :], strict=True) if flag)
    return StepRecord(signals, bool(skip), reasons, bool(overflow), raised, settings)


def _layers(named: LayerNames, norm: Tensor, largest: Tensor, nonfinite: Tensor, **more: Any) -> LayerStats:
    return LayerStats(*named, norm, largest, nonfinite, **more)
