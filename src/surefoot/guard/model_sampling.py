"""Detailed statistics of a model in training: histograms, update ratios and activations on a few sampled steps.

`Sampling` selects these steps: many at the start, where most problems occur, then fewer and fewer.

`ModelSampler` follows one optimizer. The loop calls it at each stage of a step, and logs what it returns:

    sampler = ModelSampler(models)                                     # beside the optimizer

    sampler.before_update(step, named_parameters, divide)              # gradients are ready, nothing is applied yet
    optimizer.step()
    sampler.after_update(step)
    sampler.before_forward(step + 1)                                   # hooks on, if that step is sampled
    for message in sampler.arrived(step - lag_steps):                  # for steps whose numbers are on the host by now
        log.take(message)

The run log keeps one row per step and layer. Code that writes such rows (gradient norms) adds the norms and update
ratios of the same parameters first: `columns |= sampler.layer_columns(step, names)`.

On all other steps each call is one comparison. On a sampled step everything is computed on the device of the tensors
and comes to the host in two copies, read some steps later, so that the loop never waits. An error inside ends the
sampling with one warning, never the training.

`ArrivingHistograms` does the same for given tensors, without a sampler.

The activations of the first step are left out: models are compiled, copied and wrapped before it, and hooks would
interfere.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections import deque
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, TypeVar

import torch

from surefoot.core.device_copies import begin_reading
from surefoot.errors import require
from surefoot.guard.layer_sample import LayerSample, counted, gradients_of, histograms, output_histograms, weights_of
from surefoot.observe.activations import ActivationWatch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, nn

    from surefoot.observe.histograms import Sample
    from surefoot.record.messages import Histogram, LayerRows
    from surefoot.types import NamedParameter

log = logging.getLogger("surefoot")
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Sampling:
    """Selects steps 0, 1, 2, 3, 5, 8, 12, 18, …, each `growth` times the one before, and later every `every_steps`.

    Depends on the number of the step alone, so that a resumed run selects the same steps. By default, 22 of the first
    5,000 steps and 221 of a million are selected.

    >>> [step for step in range(100) if Sampling().due(step)]
    [0, 1, 2, 3, 5, 8, 12, 18, 27, 41, 62, 93]
    """

    growth: float = 1.5
    """The factor between two selected steps."""
    every_steps: int = 4_999
    """The maximum distance between two selected steps. A prime, to avoid the round numbers at which scripts save."""

    def __post_init__(self) -> None:
        require(self.growth > 1, f"`growth` must be more than 1, or every step is sampled; got {self.growth}.")
        require(self.every_steps >= 1, f"`every_steps` must be at least 1; got {self.every_steps}.")

    def due(self, step: int) -> bool:
        """Whether this step is selected."""
        return step in self._early if step < self.every_steps else step % self.every_steps == 0

    @cached_property
    def _early(self) -> frozenset[int]:
        steps, step = {0}, 1
        while step < self.every_steps:
            steps.add(step)
            step = max(step + 1, math.ceil(step * self.growth))
        return frozenset(steps)


RANK_STEPS = Sampling(growth=1.4, every_steps=997)
"""The steps at which ranks are compared, equal on every rank. Each costs about as much as a training step."""


class ModelSampler:
    """Records sampled steps of one optimizer in detail; the module's docstring lists the calls it needs."""

    def __init__(
        self, models: Sequence[nn.Module], sampling: Sampling | None = None, *, activations: bool = True
    ) -> None:
        """Without `activations` no module gets a hook."""
        self._sampling, self._hooks = sampling or Sampling(), activations
        self._activations = ActivationWatch(models)
        weakref.finalize(self, self._activations.end)  # hooks must not outlive the sampler
        self._now: LayerSample | None = None
        self._pending: deque[LayerSample] = deque()
        self._active = True
        self._observes_forward = False

    def before_forward(self, step: int) -> None:
        """The forward pass of `step` is next."""
        if self._active and self._hooks and self._sampling.due(step):
            self._observes_forward = True
            self._safely(self._activations.begin)

    def before_update(self, step: int, named: Sequence[NamedParameter], divide: Tensor | float | None = None) -> None:
        """The gradients of `step` are complete; `divide` is the divisor that they still need."""
        if self._active and self._sampling.due(step):
            self._safely(partial(self._begin, step, named, divide))

    def after_update(self, step: int) -> None:
        """The parameters have been updated, or the step was skipped."""
        now, self._now = self._now, None
        if self._observes_forward:  # even if there was no update to measure
            self._observes_forward = False
            self._activations.end()
        if now is not None and now.step == step:
            self._safely(now.finish)
            self._pending.append(now)

    def has(self, step: int) -> bool:
        """Whether `arrived` has not returned the values of this step yet."""
        return any(each.step == step for each in self._pending)

    def layer_columns(self, step: int, names: Sequence[str]) -> dict[str, Tensor]:
        """`param_norm` and `update_ratio` of a sampled step, to add to the other columns of its rows; empty otherwise.

        Call this before `arrived` returns the step; it does not return these values again.
        """
        found: dict[str, Tensor] = {}
        for each in self._pending:
            if each.step == step:
                found |= self._safely(partial(each.columns, names)) or {}
        return found

    def arrived(self, through: int | None = None) -> list[Histogram | LayerRows]:
        """The messages up to and including step `through`, or all so far, each once. Waits for their numbers."""
        found: list[Histogram | LayerRows] = []
        while self._pending and (through is None or self._pending[0].step <= through):
            found += self._safely(self._pending.popleft().messages) or []
        return found

    def _begin(self, step: int, named: Sequence[NamedParameter], divide: Tensor | float | None) -> None:
        seen = self._activations.end()
        if self._activations.error is not None:
            raise self._activations.error
        self._now = LayerSample(step, named, divide, seen)

    def _safely(self, work: Callable[[], _Result]) -> _Result | None:
        """The result of a function. Its error ends the sampling, and the result is `None`."""
        try:
            return work()
        except Exception as error:  # observation never ends a run
            self._active, self._now = False, None
            self._activations.end()
            words = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            log.warning("histograms and activations are no longer recorded (%s); training continues", words)
            return None


class ArrivingHistograms:
    """Histograms of weights, gradients and outputs of layers that are being copied to the host.

    >>> import torch
    >>> from surefoot.types import NamedParameter
    >>> weight = torch.nn.Parameter(torch.tensor([0.0, 1.5, float("nan")]))
    >>> [found] = ArrivingHistograms([NamedParameter("weight", weight)], step=3).messages()
    >>> found.kind, sum(found.counts), found.nan
    ('weight', 2, 1)
    """

    def __init__(
        self,
        named: Sequence[NamedParameter],
        step: int,
        part: str = "",
        outputs: Sequence[tuple[str, Sample]] = (),
    ) -> None:
        """Begin to copy the histograms of the current weights and gradients, without waiting.

        `outputs` are samples of the outputs of layers, by name.
        """
        weights, gradients = weights_of(named), gradients_of(named)
        samples = [*(each.sample for each in weights), *(sample for _, sample in outputs)]
        counts = counted(samples, [each.sample for each in gradients], None)
        self._step, self._part = step, part
        self._weights, self._gradients = [each.name for each in weights], [each.name for each in gradients]
        self._outputs = [name for name, _ in outputs]
        self._copy = None if counts is None else begin_reading(counts)

    def messages(self) -> list[Histogram]:
        """All histograms. Waits for those that have not arrived."""
        if self._copy is None:
            return []
        sizes = [len(self._weights), len(self._outputs), len(self._gradients)]
        of_weights, of_outputs, of_gradients = torch.split(self._copy.wait(), sizes)
        return [
            *output_histograms(self._step, self._outputs, of_outputs, self._part),
            *histograms(self._step, "weight", self._weights, of_weights, self._part),
            *histograms(self._step, "gradient", self._gradients, of_gradients, self._part),
        ]
