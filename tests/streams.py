"""Streams of numbers that training really produces, and the small helpers that feed them to the parts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from hypothesis import strategies as st

from surefoot import Signals
from surefoot.types import GradientNorms, NamedParameter

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

NAN, INF = math.nan, math.inf

ordinary = st.floats(0.5, 2.0, width=32)
"""A norm or a loss of a healthy step."""
broken = st.sampled_from([NAN, INF, -INF])
"""What a broken step shows."""
norms = st.one_of(ordinary, st.sampled_from([0.0, 1e-20, 1e3, 1e6, NAN, INF]))
"""Gradient norms: mostly healthy, some zeros and spikes, some broken."""
losses = st.one_of(ordinary, st.floats(-2.0, 2.0, width=32), st.sampled_from([0.0, -1e3, 1e6, NAN, INF, -INF]))
"""Losses, zero-crossing ones among them."""


def norm_streams(min_size: int = 20, max_size: int = 40) -> st.SearchStrategy[list[float]]:
    """Gradient norms, step by step."""
    return st.lists(norms, min_size=min_size, max_size=max_size)


def loss_streams(min_size: int = 30, max_size: int = 70) -> st.SearchStrategy[list[float]]:
    """Losses, step by step."""
    return st.lists(losses, min_size=min_size, max_size=max_size)


def total(norm: float, each: Sequence[float] | None = None) -> GradientNorms:
    """Norms as a clipper gets them."""
    return GradientNorms(torch.tensor(norm), torch.tensor([norm] if each is None else each))


def factors(clipper: Any, stream: Iterable[float]) -> list[float]:
    """What a clipper multiplies by, step by step, from a fresh state."""
    state, found = clipper.init(1), []
    for norm in stream:
        state, factor = clipper.update(state, total(norm))
        found.append(factor.item() if factor.ndim == 0 else factor[0].item())
    return found


def judge(detector: Any, steps: Iterable[Signals], state: Any = None) -> tuple[Any, list[Any]]:
    """A detector's last state and its verdicts."""
    state, verdicts = detector.init() if state is None else state, []
    for signals in steps:
        state, verdict = detector.update(state, signals)
        verdicts.append(verdict)
    return state, verdicts


def steps(first: int = 0, **streams: Iterable[float]) -> list[Signals]:
    """One `Signals` per step out of streams of equal length."""
    names = list(streams)
    rows = zip(*streams.values(), strict=True)
    return [Signals(first + i, **dict(zip(names, row, strict=True))) for i, row in enumerate(rows)]


def flags(detector: Any, signals: Iterable[Signals], state: Any = None) -> list[bool]:
    """Whether each step is anomalous."""
    return [bool(verdict.anomalous) for verdict in judge(detector, signals, state)[1]]


def alarms(detector: Any, signals: Iterable[Signals]) -> list[int]:
    """The steps at which the detector raises more than a remark."""
    return [i for i, v in enumerate(judge(detector, signals)[1]) if v.anomalous and v.severity != "info"]


def with_gradient(gradient: torch.Tensor, weight: torch.Tensor | None = None, name: str = "weight") -> NamedParameter:
    """A parameter that has this gradient."""
    data = torch.zeros(gradient.shape, dtype=gradient.dtype) if weight is None else weight.clone()
    parameter = torch.nn.Parameter(data)
    parameter.grad = gradient.clone()
    return NamedParameter(name, parameter)


def same(a: Any, b: Any) -> bool:
    """Whether two packed states are equal, NaN and all."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a.nan_to_num(-1), b.nan_to_num(-1))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b) or (a != a and b != b)
