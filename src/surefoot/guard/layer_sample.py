"""One sampled step in detail: histograms of weights, gradients and activations, and the size of the update.

It is created before the update, finished after it, and read when its numbers are on the host. Everything is computed on
the device of the tensors; two copies bring it to the host, one of counts and one of numbers.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from surefoot.core.device_copies import AsyncCopy, begin_reading
from surefoot.core.without_hooks import WithoutHooks
from surefoot.observe.activations import LayerOutput, calls_by_module
from surefoot.observe.histograms import Bins, Sample, count, sample_again, take_sample
from surefoot.observe.tensors import TensorMeter, is_plain
from surefoot.record.bins import COUNT, LARGEST_POWER, SMALLEST_POWER
from surefoot.record.messages import Histogram, LayerRows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from surefoot.types import NamedParameter

T = TypeVar("T")
Kind: TypeAlias = Literal["weight", "gradient", "activation"]
MOST_HISTOGRAMS = 1000
"""The maximum number of parameters with histograms; in a larger model they are chosen evenly, always the same ones."""
BINS = Bins(SMALLEST_POWER, LARGEST_POWER)


class ParameterSample(NamedTuple):
    """A sample of a parameter, or of its gradient."""

    name: str
    parameter: Tensor
    sample: Sample


def evenly(items: Sequence[T]) -> Sequence[T]:
    """At most `MOST_HISTOGRAMS` of these, evenly spaced."""
    return items[:: -(-len(items) // MOST_HISTOGRAMS)] if len(items) > MOST_HISTOGRAMS else items


def weights_of(named: Sequence[NamedParameter]) -> list[ParameterSample]:
    """Samples of the parameters that have values to measure."""
    samples = [(each, take_sample(each.parameter)) for each in named]
    return [ParameterSample(each.name, each.parameter, sample) for each, sample in samples if sample is not None]


def gradients_of(named: Sequence[NamedParameter]) -> list[ParameterSample]:
    """Samples of the existing gradients."""
    gradients = [(each, each.parameter.grad) for each in named]
    samples = [(each, take_sample(gradient)) for each, gradient in gradients if gradient is not None]
    return [ParameterSample(each.name, each.parameter, sample) for each, sample in samples if sample is not None]


def counted(plain: Sequence[Sample], scaled: Sequence[Sample], divide: Tensor | float | None) -> Tensor | None:
    """The histograms of all samples, one row each; the `scaled` ones are divided first. `None` if there are none."""
    tables = []
    if plain:
        tables.append(count(plain, BINS))
    if scaled:
        tables.append(count(scaled, BINS, divide))
    return torch.cat([table.to(tables[0].device) for table in tables]) if tables else None


def histograms(step: int, kind: Kind, names: Sequence[str], counts: Tensor, part: str = "") -> list[Histogram]:
    """Messages of the run log from counts on the host, a row for each name."""
    return [_histogram(step, kind, name, row, part) for name, row in zip(names, counts.tolist(), strict=True)]


def output_histograms(step: int, names: Sequence[str], counts: Tensor, part: str = "") -> list[Histogram]:
    """Messages for the outputs of modules, combined over all calls of each; `names` belong to the rows of `counts`."""
    calls = calls_by_module(names)
    combined = [counts[own].sum(0) for own in calls.values()]
    return histograms(step, "activation", list(calls), torch.stack(combined), part) if combined else []


def _histogram(step: int, kind: Kind, name: str, row: Sequence[int], part: str) -> Histogram:
    nan, positive_inf, negative_inf = row[COUNT:]
    return Histogram(step, kind, name, row[:COUNT], nan, positive_inf, negative_inf, part)


class OutputMoments(NamedTuple):
    """Numbers of one call of one module, on the host."""

    size: int
    """The number of values for the first two and for the last."""
    mean: float
    variance: float
    largest: float
    saturated: float


def pooled(calls: Sequence[OutputMoments]) -> OutputMoments:
    """Combine the numbers of all calls of a module."""
    total = sum(call.size for call in calls)
    if len(calls) == 1 or not total:
        return calls[0]
    mean = sum(call.size * call.mean for call in calls) / total
    variance = sum(call.size * (call.variance + (call.mean - mean) ** 2) for call in calls) / total
    broken = any(math.isnan(call.largest) for call in calls)  # `max` ignores a NaN that is not the first
    largest = math.nan if broken else max(call.largest for call in calls)
    return OutputMoments(total, mean, variance, largest, sum(call.size * call.saturated for call in calls) / total)


class LayerSample:
    """One sampled step."""

    def __init__(
        self,
        step: int,
        named: Sequence[NamedParameter],
        divide: Tensor | float | None,
        activations: Sequence[LayerOutput],
    ) -> None:
        """Take the samples; `divide` is the divisor that the gradients still need."""
        self.step = step
        self._taken, gradients, self._activations = weights_of(named), gradients_of(evenly(named)), activations
        self._weights, self._gradients = [each.name for each in self._taken], [each.name for each in gradients]
        shown = evenly(self._taken)
        self._shown = [each.name for each in shown]
        self._outputs = [each.name for each in activations]
        self._units = [(each.name, each.units) for each in activations if each.dead is not None]
        self._saturates = {each.name for each in activations if each.saturates}
        self._sizes = [each.sample.values.numel() for each in activations]
        unscaled = [each.sample for each in shown] + [each.sample for each in activations]
        self._counts = counted(unscaled, [each.sample for each in gradients], divide)
        self._measured = _norms(self._taken)
        self._columns: tuple[str, ...] = ()
        self._columns_taken = False
        self._readings: tuple[AsyncCopy, AsyncCopy] | None = None

    def finish(self) -> None:
        """After the update: measure it, start the copies to the host, and release the device memory."""
        if self._counts is not None:
            with WithoutHooks():
                measured = self._measured | _ratios(self._taken)
                dead = [each.dead.reshape(1) for each in self._activations if each.dead is not None]
                moments = [each.moments for each in self._activations]
                found = (*measured.values(), *dead, *moments)
                numbers = [each.to(self._counts.device, torch.float32) for each in found]
                empty = self._counts.new_zeros(0, dtype=torch.float32)
                self._readings = begin_reading(self._counts), begin_reading(torch.cat([empty, *numbers]))
            self._columns = tuple(measured)
        self._counts, self._measured, self._taken, self._activations = None, {}, [], ()

    def columns(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Parameter norms and update ratios in the order of `names`, NaN where missing. `messages` then omits them.

        Waits for the numbers if they have not arrived.
        """
        if self._readings is None:
            return {}
        known, self._columns_taken = self._by_column(), True
        place = {name: i for i, name in enumerate(self._weights)}
        chosen = torch.tensor([place.get(name, -1) for name in names], device="cpu")
        return {key: torch.where(chosen < 0, torch.nan, values[chosen]) for key, values in known.items()}

    def messages(self) -> list[Histogram | LayerRows]:
        """All messages for the run log. Waits for the numbers if they have not arrived."""
        if self._readings is None:
            return []
        sizes = [len(self._shown), len(self._outputs), len(self._gradients)]
        weights, outputs, gradients = torch.split(self._readings[0].wait(), sizes)
        return [
            *histograms(self.step, "weight", self._shown, weights),
            *output_histograms(self.step, self._outputs, outputs),
            *histograms(self.step, "gradient", self._gradients, gradients),
            *self._layers(),
        ]

    def _layers(self) -> list[LayerRows]:
        columns = {} if self._columns_taken else self._by_column()
        found = [LayerRows(self.step, self._weights, columns)] if columns else []
        if self._outputs:
            found.append(LayerRows(self.step, *self._activation_columns()))
        return found

    def _activation_columns(self) -> tuple[list[str], dict[str, list[float | None]]]:
        """The modules, and the statistics of their outputs."""
        rest = self._numbers()[len(self._columns) * len(self._weights) :].tolist()
        shares = self._dead_shares(rest[: len(self._units)])
        moments = [
            OutputMoments(count, *rest[place : place + 4])
            for count, place in zip(self._sizes, range(len(self._units), len(rest), 4), strict=True)
        ]
        calls = calls_by_module(self._outputs)
        outputs = {name: pooled([moments[i] for i in own]) for name, own in calls.items()}
        columns: dict[str, list[float | None]] = {
            "activation_mean": [each.mean for each in outputs.values()],
            "activation_std": [math.sqrt(each.variance) for each in outputs.values()],
            "activation_largest": [each.largest for each in outputs.values()],
            "dead_share": [shares.get(name) for name in outputs],
            "saturated_share": [each.saturated if name in self._saturates else None for name, each in outputs.items()],
        }
        return list(outputs), columns

    def _numbers(self) -> Tensor:
        assert self._readings is not None
        return self._readings[1].wait()

    def _by_column(self) -> dict[str, Tensor]:
        numbers, size = self._numbers(), len(self._weights)
        return {name: numbers[i * size : (i + 1) * size] for i, name in enumerate(self._columns)}

    def _dead_shares(self, dead: list[float]) -> Mapping[str, float]:
        """For each module, the share of dead units over all its calls."""
        units = [count for _, count in self._units]
        return {
            name: sum(dead[i] for i in calls) / sum(units[i] for i in calls)
            for name, calls in calls_by_module([name for name, _ in self._units]).items()
        }


def _norms(weights: Sequence[ParameterSample]) -> dict[str, Tensor]:
    """The norm of each parameter, except for sharded ones, whose norm would need a collective."""
    tensors = [each.parameter.detach() for each in weights]
    if not tensors or not all(is_plain(tensor) and tensor.is_floating_point() for tensor in tensors):
        return {}
    return {"param_norm": TensorMeter().measure(tensors).norm}


def _ratios(weights: Sequence[ParameterSample]) -> dict[str, Tensor]:
    """The size of each parameter's change relative to its norm, from the sampled values; Inf if it was zero before."""
    now = [sample_again(each.parameter) for each in weights]
    before = [each.sample.values for each in weights]
    if not before or any(new is None or new.shape != old.shape for new, old in zip(now, before, strict=True)):
        return {}  # the parameters were replaced in the meantime
    moved = torch._foreach_norm(torch._foreach_sub([new for new in now if new is not None], before))
    home = before[0].device
    distance, norm = (
        torch.stack([each.to(home, torch.float32) for each in side]) for side in (moved, torch._foreach_norm(before))
    )
    return {"update_ratio": torch.where(distance == 0, 0, distance / norm)}
