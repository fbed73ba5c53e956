"""Tell weights nobody has touched since PyTorch made them from weights that were loaded, trained or set by hand.

PyTorch's own defaults have a known distribution per layer: uniform within a bound for `Linear`, convolutions and
recurrent layers, standard normal for `Embedding`, constants for norms. A tensor that fits its default is fresh. One
that does not carries somebody's intention, so `init_for` keeps it. Training gives itself away quickly: one Adam step
pushes some values past the uniform's hard edge.

The test is the Kolmogorov-Smirnov distance with a threshold that a fresh tensor fails once in a million. Weights that
were loaded but happen to *be* a default draw (a checkpoint of an untrained model) cannot be told apart; name those in
`skip`.
"""

import math
from typing import Literal

import torch
from torch import Tensor

Default = tuple[Literal["uniform", "normal", "constant"], float]
"""Which distribution a fresh tensor has, and its bound, standard deviation or value."""

_ONE_IN_A_MILLION = 2.69
"""Kolmogorov's distribution: P(√n·D > 2.69) ≈ 1e-6."""

_SAMPLE = 65_536
"""Values looked at in one tensor; enough to see a change of one per cent in scale."""


def looks_fresh(tensor: Tensor, default: Default) -> bool:
    """Whether `tensor` could be PyTorch's own default draw."""
    shape, scale = default
    values = tensor.detach().flatten().double()
    if values.numel() == 0 or shape == "constant":
        return bool((values == scale).all())
    if scale == 0.0 or not bool(values.isfinite().all()):
        return False
    slack = 1.0 + 2.0 * torch.finfo(tensor.dtype).eps
    if shape == "uniform" and float(values.abs().max()) > scale * slack:
        return False
    stride = max(1, values.numel() // _SAMPLE)
    ordered = (values[::stride] / scale).sort().values
    expected = (ordered + 1.0) / 2.0 if shape == "uniform" else torch.special.ndtr(ordered)
    count = ordered.numel()
    rank = torch.arange(count, dtype=torch.float64, device=ordered.device) / count
    distance = float(torch.maximum((expected - rank).abs(), (rank + 1.0 / count - expected).abs()).max())
    grain = torch.finfo(tensor.dtype).eps if tensor.dtype.itemsize < 4 else 0.0  # half precision repeats values
    return math.sqrt(count) * max(0.0, distance - grain) < _ONE_IN_A_MILLION
