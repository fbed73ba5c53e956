"""Learning-rate range test: train briefly at increasing rates, find where the loss falls fastest and where it jumps.

Smith 2017 (arXiv:1506.01186). The rate grows by the same factor each step, and the test ends when the loss is no longer
finite, or above its best by three times its size. The suggestion is the rate of steepest descent of the smoothed loss,
or a fifth of the rate at which that loss is lowest, whichever is higher. The steepest descent alone can be a hundred
times too low: the longer the test takes, the more is learned at its low rates, and one easy direction of a badly scaled
problem is learned at rates that are far too low for the others. The smoothing uses both sides: the usual running
average lags by ten steps, in which the rate grows several-fold, and so suggests a rate that is several times too high.

The test really trains; afterwards model, optimizer, random streams and the loader's generators are restored bitwise.

Not included: gradient scalers. For half precision use `autocast` inside `loss_of` with bfloat16, which needs none.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from surefoot.build.line_chart import Chart, ChartSeries, to_svg, to_text
from surefoot.core.random_state import loader_generators
from surefoot.core.save_restore import untouched

Batch = TypeVar("Batch")

_SMOOTHING = 0.8
"""Weight of a neighbour, per step of distance."""

_BELOW_LOWEST = 5.0
"""The maximum factor between the rate of the lowest loss and the suggestion; shortly after that rate the loss rises."""

_BLOWN_UP = 3.0
"""The size of a jump that ends the test, in multiples of the size of the losses so far."""


@dataclass(frozen=True)
class LRRange:
    """The result of the range test."""

    rates: tuple[float, ...]
    """The learning rate of each step taken."""

    losses: tuple[float, ...]
    """The loss of each step, before its update."""

    smoothed: tuple[float, ...]
    """The losses smoothed."""

    suggested: float | None
    """The rate of steepest descent, or a fifth of that of the lowest loss if that is more; `None` if it never fell."""

    diverged_at: float | None
    """The rate at which the loss diverged; `None` if it never did."""

    def chart(self) -> Chart:
        """The curve, with the suggestion marked."""
        marks = () if self.suggested is None else ((self.suggested, f"suggested {self.suggested:.2g}"),)
        lines = (ChartSeries("smoothed", self.rates, self.smoothed), ChartSeries("loss", self.rates, self.losses))
        return Chart("Learning-rate range test", "learning rate", "loss", lines, log_x=True, marks=marks)

    def __str__(self) -> str:
        if not self.losses:
            return "The first loss is not finite, before any step: check data, labels and loss."
        if self.suggested is None:
            verdict = "The loss never fell: check data, labels and loss first, or try lower rates."
        else:
            verdict = f"Suggested learning rate: {self.suggested:.2g}."
        if self.diverged_at is not None:
            verdict += f" The loss diverges at {self.diverged_at:.2g}."
        return f"{to_text(self.chart())}\n{verdict}"


def find_lr(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Batch],
    loss_of: Callable[[nn.Module, Batch], Tensor],
    *,
    lowest: float = 1e-6,
    highest: float = 1.0,
    steps: int = 100,
    show: bool = True,
    picture: str | Path | None = None,
) -> LRRange:
    """Run the range test, restore everything, and return the curve.

    Args:
        model: Trained for a few steps, then restored.
        optimizer: Steps `model`, then restored. Groups keep the ratios between their rates; the rates reported are the
            largest group's.
        batches: A loader or a list, iterated again if it ends before `steps`.
        loss_of: `loss_of(model, batch)` gives the loss to descend.
        lowest: The rate of the first step.
        highest: The rate of the last.
        steps: The number of steps; more steps give a smoother curve.
        show: Print the curve to the terminal.
        picture: Also write it as SVG to this file, unless not even the first loss was finite.
    """
    if not 0.0 < lowest < highest or steps < 10:
        raise ValueError(f"Expected 0 < lowest < highest and steps >= 10; got {lowest=}, {highest=}, {steps=}.")
    growth = (highest / lowest) ** (1.0 / (steps - 1))
    planned = [lowest * growth**step for step in range(steps)]
    with untouched(model, optimizer, loader_generators(batches)), torch.enable_grad():
        model.train()
        losses, diverged_at = _train(model, optimizer, _cycled(batches), loss_of, planned)
    rates = planned[: len(losses)]
    smoothed = [_smooth(losses, at) for at in range(len(losses))]
    result = LRRange(tuple(rates), tuple(losses), tuple(smoothed), _suggest(rates, smoothed), diverged_at)
    if show:
        print(result)
    if picture is not None and losses:
        Path(picture).write_text(to_svg(result.chart()), encoding="utf-8")
    return result


def _train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[Batch],
    loss_of: Callable[[nn.Module, Batch], Tensor],
    rates: list[float],
) -> tuple[list[float], float | None]:
    """Take one step at each rate; returns the loss before each, and the rate at which the loss diverged, if it did."""
    losses: list[float] = []
    shares = _shares(optimizer)
    for rate in rates:
        batch = next(batches)
        _set_rate(optimizer, rate, shares)
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        value = float(loss.detach())
        if _diverged(value, losses):
            return losses, rate
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(value)
    return losses, None


def _cycled(batches: Iterable[Batch]) -> Iterator[Batch]:
    while True:
        empty = True
        for batch in batches:
            empty = False
            yield batch
        if empty:
            raise ValueError("`batches` is empty, or an exhausted iterator. Pass a loader or a list.")


def _shares(optimizer: torch.optim.Optimizer) -> list[float]:
    own = [float(group["lr"]) for group in optimizer.param_groups]
    return [rate / max(own) if max(own) > 0.0 else 1.0 for rate in own]


def _set_rate(optimizer: torch.optim.Optimizer, rate: float, shares: list[float]) -> None:
    for group, share in zip(optimizer.param_groups, shares, strict=True):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate * share)
        else:
            group["lr"] = rate * share


def _diverged(loss: float, losses: list[float]) -> bool:
    """Judge by the size of the losses so far, so that negative ones work too."""
    if not losses:
        return not math.isfinite(loss)
    best = min(losses)
    return not loss <= best + _BLOWN_UP * max(abs(best), abs(losses[0]))


def _smooth(losses: list[float], at: int) -> float:
    """Average around one step, nearer steps counting more."""
    weights = [_SMOOTHING ** abs(step - at) for step in range(len(losses))]
    return sum(weight * loss for weight, loss in zip(weights, losses, strict=True)) / sum(weights)


def _suggest(rates: list[float], smoothed: list[float]) -> float | None:
    steepest = _steepest(rates, smoothed)
    if steepest is None:
        return None
    lowest = min(range(len(smoothed)), key=smoothed.__getitem__)
    return max(steepest, rates[lowest] / _BELOW_LOWEST)


def _steepest(rates: list[float], smoothed: list[float]) -> float | None:
    """Find the step around which the loss falls most, over a twentieth of the test on each side."""
    reach = max(1, len(smoothed) // 20)
    falls = {step: smoothed[step - reach] - smoothed[step + reach] for step in range(reach, len(smoothed) - reach)}
    best = max(falls, key=falls.__getitem__, default=None)
    return rates[best] if best is not None and falls[best] > 0.0 else None
