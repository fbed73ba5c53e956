"""One formula for two libraries: numpy for signals that are floats, torch for signals that are on a device.

A step rule is written once against the functions that numpy and torch share (`where`, `maximum`, `isfinite`, …); this
module picks the library of the step's signals and covers the few functions the two spell differently. Floats
go through numpy because a handful of numbers is an order of magnitude cheaper there than in torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

if TYPE_CHECKING:
    from surefoot.types import Scalar, Signals

_QUARTERS = np.array((0.25, 0.5, 0.75))

Array: TypeAlias = Any
"""A numpy array or a torch tensor."""


class Library:
    """The functions step rules use, from numpy or from torch on one device."""

    def __init__(self, device: torch.device | None) -> None:
        self.device = device
        self.functions: Any = np if device is None else torch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.functions, name)

    def scalar(self, value: Scalar | None) -> Array:
        """A signal as a 0-d array without reading it; NaN for what was not measured."""
        value = torch.nan if value is None else value
        if self.device is None:
            return np.float64(value)
        if isinstance(value, torch.Tensor):
            return value.detach().to(device=self.device, dtype=torch.float32)
        return torch.full((), value, dtype=torch.float32, device=self.device)  # a fill: `torch.tensor` would sync

    def own(self, array: Array) -> Array:
        """A part of the state, in this library and on this device. Moves nothing that is there already."""
        if self.device is None:
            return array.cpu().numpy() if isinstance(array, torch.Tensor) else array
        return torch.as_tensor(array, dtype=torch.float32, device=self.device)

    def is_finite(self, values: Array) -> Array:
        """False for NaN and Inf; two kernels where `torch.isfinite` launches four."""
        return abs(values) < np.inf

    def sort_rows(self, rows: Array) -> Array:
        """Each row in ascending order, NaN last."""
        return np.sort(rows, axis=1) if self.device is None else torch.sort(rows, dim=1).values

    def pick(self, rows: Array, places: Array) -> Array:
        """The entries of each row at `places`, rounded to whole positions."""
        if self.device is None:
            return np.take_along_axis(rows, np.rint(places).astype(np.int64), axis=1)
        return rows.gather(1, places.round().to(torch.int64))

    def quarters(self) -> Array:
        """One, two and three quarters."""
        return _QUARTERS if self.device is None else torch.linspace(0.25, 0.75, 3, device=self.device)


_ON_HOST = Library(None)


def library_of(signals: Signals) -> Library:
    """The library for the signals of this step."""
    return _ON_HOST if signals.device is None else Library(signals.device)
