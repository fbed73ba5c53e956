"""One sampled step seen closely: how weights, gradients and activations are spread, and how far the update went.

Made before the update, finished after it, read when its numbers have come to the host. Everything is computed where the
tensors lie; two copies bring it over, one of counts and one of numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from surefoot.observe.activations import Activation, combined_calls
from surefoot.observe.calm import Unnoticed
from surefoot.observe.histograms import Bins, Sample, count, sample_again, take_sample
from surefoot.observe.readings import Reading, begin_reading
from surefoot.observe.tensors import TensorMeter, is_plain
from surefoot.record.bins import COUNT, LARGEST_POWER, SMALLEST_POWER
from surefoot.record.messages import Histogram, LayerRows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from surefoot.types import NamedParameter

Kind: TypeAlias = Literal["weight", "gradient", "activation"]
BINS = Bins(SMALLEST_POWER, LARGEST_POWER)


class Taken(NamedTuple):
    """A sample of something that has a name."""

    kind: Kind
    name: str
    tensor: Tensor | None
    """The parameter, for one that will be sampled again after the update."""
    sample: Sample


def weights_of(named: Sequence[NamedParameter]) -> list[Taken]:
    """Samples of the parameters that have values to look at."""
    samples = [(each, take_sample(each.parameter)) for each in named]
    return [Taken("weight", each.name, each.parameter, sample) for each, sample in samples if sample is not None]


def gradients_of(named: Sequence[NamedParameter]) -> list[Taken]:
    """Samples of the gradients there are."""
    gradients = [(each.name, each.parameter.grad) for each in named]
    samples = [(name, take_sample(gradient)) for name, gradient in gradients if gradient is not None]
    return [Taken("gradient", name, None, sample) for name, sample in samples if sample is not None]


def counted(plain: Sequence[Taken], scaled: Sequence[Taken], divide: Tensor | float | None) -> Tensor | None:
    """The histograms of all of them, a row each; those that are `scaled` are divided first. `None` for none."""
    tables = []
    if plain:
        tables.append(count([each.sample for each in plain], BINS))
    if scaled:
        tables.append(count([each.sample for each in scaled], BINS, divide))
    return torch.cat([table.to(tables[0].device) for table in tables]) if tables else None


def histograms(step: int, taken: Sequence[Taken], counts: Tensor, part: str) -> list[Histogram]:
    """Messages of the run log from counts on the host."""
    rows = zip(taken, counts.tolist(), strict=True)
    return [_histogram(step, each.kind, each.name, row, part) for each, row in rows]


def _histogram(step: int, kind: Kind, name: str, row: Sequence[int], part: str) -> Histogram:
    nan, positive_inf, negative_inf = row[COUNT:]
    return Histogram(step, kind, name, row[:COUNT], nan, positive_inf, negative_inf, part)


class CloseUp:
    """One sampled step."""

    def __init__(
        self,
        step: int,
        named: Sequence[NamedParameter],
        divide: Tensor | float | None,
        activations: Sequence[Activation],
    ) -> None:
        """Take the samples; `divide` is what the gradients still have to be divided by."""
        self.step = step
        self._weights, self._gradients, self._activations = weights_of(named), gradients_of(named), activations
        outputs = [Taken("activation", each.name, None, each.sample) for each in activations]
        self._counts = counted([*self._weights, *outputs], self._gradients, divide)
        self._columns = _norms(self._weights)
        self._readings: tuple[Reading, Reading] | None = None

    def finish(self) -> None:
        """The update is done: see how far it went, and send everything on its way."""
        if self._counts is None:
            return
        with Unnoticed():
            self._columns |= _ratios(self._weights)
            dead = [each.dead.reshape(1) for each in self._activations if each.dead is not None]
            numbers = [each.to(self._counts.device, torch.float32) for each in (*self._columns.values(), *dead)]
            empty = self._counts.new_zeros(0, dtype=torch.float32)
            self._readings = begin_reading(self._counts), begin_reading(torch.cat([empty, *numbers]))
        self._counts = None

    def messages(self, part: str) -> list[Histogram | LayerRows]:
        """Everything, for the run log. Waits for the numbers if they have not arrived."""
        if self._readings is None:
            return []
        counts, numbers = (reading.wait() for reading in self._readings)
        edges = len(self._weights), len(self._weights) + len(self._activations)
        return [
            *histograms(self.step, self._weights, counts[: edges[0]], part),
            *self._of_activations(counts[edges[0] : edges[1]], part),
            *histograms(self.step, self._gradients, counts[edges[1] :], part),
            *self._layers(numbers, part),
        ]

    def _of_activations(self, counts: Tensor, part: str) -> list[Histogram]:
        """One histogram per module, of all its calls together."""
        found = []
        for name, calls in combined_calls(self._activations).items():
            found.append(_histogram(self.step, "activation", name, counts[calls].sum(0).tolist(), part))
        return found

    def _layers(self, numbers: Tensor, part: str) -> list[LayerRows]:
        size = len(self._weights)
        columns = {name: numbers[i * size : (i + 1) * size] for i, name in enumerate(self._columns)}
        found = [LayerRows(self.step, [each.name for each in self._weights], columns, part)] if columns else []
        shares = self._dead_shares(numbers[len(columns) * size :].tolist())
        if shares:
            column = torch.tensor(list(shares.values()), dtype=torch.float32, device="cpu")
            found.append(LayerRows(self.step, list(shares), {"dead_share": column}, part))
        return found

    def _dead_shares(self, dead: list[float]) -> Mapping[str, float]:
        """Per module: dead units over units, of all its calls together."""
        looked = [each for each in self._activations if each.dead is not None]
        return {
            name: sum(dead[i] for i in calls) / sum(looked[i].units for i in calls)
            for name, calls in combined_calls(looked).items()
        }


def _norms(weights: Sequence[Taken]) -> dict[str, Tensor]:
    """The norm of each parameter; left out where one is spread over ranks, which would have to agree to measure it."""
    tensors = [each.tensor.detach() for each in weights if each.tensor is not None]
    if not tensors or not all(is_plain(tensor) and tensor.is_floating_point() for tensor in tensors):
        return {}
    return {"param_norm": TensorMeter().measure(tensors).norm}


def _ratios(weights: Sequence[Taken]) -> dict[str, Tensor]:
    """How far each parameter moved, relative to its size, by the sampled values; Inf for one that was zero before."""
    now = [sample_again(each.tensor) for each in weights if each.tensor is not None]
    before = [each.sample.values for each in weights]
    if not before or any(new is None or new.shape != old.shape for new, old in zip(now, before, strict=True)):
        return {}  # the parameters were replaced meanwhile
    moved = torch._foreach_norm(torch._foreach_sub([new for new in now if new is not None], before))
    size = torch._foreach_norm(before)
    home = before[0].device
    distance, norm = (torch.stack([each.to(home, torch.float32) for each in side]) for side in (moved, size))
    return {"update_ratio": torch.where(distance == 0, 0, distance / norm)}
