"""Distinguish weights as PyTorch initialised them from weights that were loaded, trained or set by hand.

PyTorch's own defaults have a known distribution per layer: uniform within a bound for `Linear`, convolutions and
recurrent layers, standard normal for `Embedding`, constants for norms. A tensor that fits its default is fresh. One
that does not was set on purpose, so `init_for` keeps it. Training is detected quickly: one Adam step
pushes some values past the uniform's hard edge.

The tests are the Kolmogorov-Smirnov distance, which sees another shape, and the second moment, which sees another
scale, each with a threshold that a fresh tensor fails once in a million. Some tensors fit their default and could still
be trained a little: short ones, and embeddings, whose normal distribution has no edge. Those are `UNSURE`, and the rest
of the model decides. A loaded checkpoint of an untrained model looks like a fresh one; name it in `skip`.
"""

import math
from enum import Enum
from typing import Literal

import torch
from torch import Tensor

Default = tuple[Literal["uniform", "normal", "constant"], float]
"""Which distribution a fresh tensor has, and its bound, standard deviation or value."""

_ONE_IN_A_MILLION = 2.69
"""Kolmogorov's distribution: P(√n·D > 2.69) ≈ 1e-6."""

_SIGMAS = 4.9
"""The same odds for a normal deviate, both ways."""

_ENOUGH = 256
"""Uniform values among which training that moved them by a tenth of their bound all but surely crossed the edge."""

_SAMPLE = 65_536
"""Values sampled in one tensor; enough to detect a change of one percent in scale."""


class Freshness(Enum):
    """What the values show about their origin; the larger one wins if a module's parameters disagree."""

    UNSURE = 0
    FRESH = 1
    SET = 2

    def joined(self, other: "Freshness | None") -> "Freshness":
        """Judge two parameters of one module together."""
        return self if other is None or self.value >= other.value else other


def freshness(tensor: Tensor, defaults: tuple[Default, ...]) -> Freshness:
    """Judge one tensor against what PyTorch would have drawn for it."""
    matching = [default for default in defaults if looks_fresh(tensor, default)]
    if not matching:
        return Freshness.SET
    if matching[0][0] == "uniform" and tensor.numel() < _ENOUGH:
        return Freshness.UNSURE
    return Freshness.UNSURE if matching[0][0] == "normal" else Freshness.FRESH


def looks_fresh(tensor: Tensor, default: Default) -> bool:
    """Whether `tensor` could be PyTorch's own default draw."""
    shape, scale = default
    values = tensor.detach().flatten()
    if values.numel() == 0 or shape == "constant":
        return bool((values == scale).all())
    low, high = (float(end) for end in values.aminmax())
    if scale == 0.0 or not (math.isfinite(low) and math.isfinite(high)):
        return False
    slack = 1.0 + 2.0 * torch.finfo(tensor.dtype).eps
    if shape == "uniform" and max(-low, high) > scale * slack:
        return False
    stride = max(1, values.numel() // _SAMPLE)
    ordered = (values[::stride].double() / scale).sort().values
    return _scale_fits(ordered, shape) and _shape_fits(ordered, shape, tensor.dtype)


def _scale_fits(values: Tensor, shape: str) -> bool:
    expected, fourth = (1.0 / 3.0, 1.0 / 5.0) if shape == "uniform" else (1.0, 3.0)
    error = math.sqrt((fourth - expected**2) / values.numel())  # of the mean square, over draws
    return abs(float(values.square().mean()) - expected) < _SIGMAS * error + 1e-3 * expected


def _shape_fits(ordered: Tensor, shape: str, dtype: torch.dtype) -> bool:
    expected = (ordered + 1.0) / 2.0 if shape == "uniform" else torch.special.ndtr(ordered)
    count = ordered.numel()
    rank = torch.arange(count, dtype=torch.float64, device=ordered.device) / count
    distance = float(torch.maximum((expected - rank).abs(), (rank + 1.0 / count - expected).abs()).max())
    grain = torch.finfo(dtype).eps if dtype.itemsize < 4 else 0.0  # half precision repeats values
    return math.sqrt(count) * max(0.0, distance - grain) < _ONE_IN_A_MILLION
