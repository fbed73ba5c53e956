"""Bring features to mean 0 and variance 1 with statistics of the training data alone.

`Standardizer.fit` reads the training data, whole or batch by batch, and returns an object that cannot be changed: there
is no way to let validation data into it by calling it once too often, and what is read of it are copies. Batches are
merged in float64 with the formula of Chan, Golub and LeVeque (1979), which does not subtract large squares from each
other, so a feature around 1e8 keeps its digits. Partial results of several workers are joined with `merge`.

A column that never varies is only centred, so it becomes exactly 0, and `constant` names it. Integers are refused: see
the message. Left out: robust statistics (median, quantiles) and whitening.
"""

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from surefoot.core.formats import STANDARDIZER
from surefoot.core.settings import shown
from surefoot.core.wording import count_of
from surefoot.errors import require

Array = Tensor | np.ndarray
NanPolicy = Literal["raise", "ignore", "fill"]


@dataclass(frozen=True, eq=False)
class Standardizer:
    """Per-feature statistics of the training data, and the transformation that standardises with them."""

    count: Tensor
    """How many finite values each feature had (int64)."""

    mean: Tensor
    """Their mean (float64)."""

    spread: Tensor
    """The sum of their squared distances from the mean (float64)."""

    lowest: Tensor
    """The smallest (float64)."""

    highest: Tensor
    """The largest (float64)."""

    feature_axis: int
    """Where the features are: -1 in a table, 1 in a batch of images."""

    nan: NanPolicy
    """`raise` on values that are not finite, `ignore` them (they stay), or `fill` them with the mean, which is 0."""

    @classmethod
    def fit(cls, data: Array | Iterable[Array], *, feature_axis: int = -1, nan: NanPolicy = "raise") -> "Standardizer":
        """Take the statistics of one array, or of an iterable of batches that need not fit in memory together."""
        if nan not in ("raise", "ignore", "fill"):
            raise ValueError(f"`nan` must be 'raise', 'ignore' or 'fill'; got {nan!r}.")
        result: Standardizer | None = None
        is_several = isinstance(data, Iterable) and not isinstance(data, str)
        require(is_several, f"`data` must be an array, or an iterable of arrays; got {shown(data)}.")
        for batch in [data] if isinstance(data, Tensor | np.ndarray) else data:
            values = _floating(batch)
            if values.ndim < 2:
                raise ValueError(f"Expected samples and features, at least 2 dimensions; got {tuple(values.shape)}.")
            if values.numel() == 0:
                continue
            part = cls._of_one(values, feature_axis, nan)
            result = part if result is None else result.merge(part)
        if result is None:
            raise ValueError("No data: expected an array or at least one batch.")
        empty = (result.count == 0).nonzero().flatten().tolist()
        if empty:
            raise ValueError(f"Features {empty} have no finite value at all. Drop them.")
        return result

    @classmethod
    def _of_one(cls, batch: Tensor, feature_axis: int, nan: NanPolicy) -> "Standardizer":
        columns = _columns(batch.detach().cpu().double(), feature_axis)
        finite = columns.isfinite()
        if nan == "raise":
            _refuse_nonfinite(finite)
        count = finite.sum(0)
        some = count.clamp(min=1)
        mean = columns.where(finite, 0.0).sum(0) / some
        # A second pass takes out what rounding left in the first.
        mean = mean + (columns - mean).where(finite, 0.0).sum(0) / some
        spread = (columns - mean).where(finite, 0.0).square().sum(0)
        lowest = columns.where(finite, torch.inf).amin(0)
        highest = columns.where(finite, -torch.inf).amax(0)
        return cls(count, mean, spread, lowest, highest, feature_axis, nan)

    def merge(self, other: "Standardizer") -> "Standardizer":
        """Merge with the statistics of other data: the result is that of all the data together."""
        if self.mean.shape != other.mean.shape:
            raise ValueError(f"Expected {len(self.mean)} features in every part; got {len(other.mean)}.")
        count = self.count + other.count
        weight = other.count.double() / count.clamp(min=1)  # integers would divide in float32
        gap = other.mean - self.mean
        return Standardizer(
            count,
            self.mean + gap * weight,
            self.spread + other.spread + gap.square() * self.count * weight,
            torch.minimum(self.lowest, other.lowest),
            torch.maximum(self.highest, other.highest),
            self.feature_axis,
            self.nan,
        )

    @property
    def constant(self) -> Tensor:
        """Which features never varied (bool); exact, because it compares the extremes and not a rounded variance."""
        return self.lowest == self.highest

    @property
    def scale(self) -> Tensor:
        """The standard deviation of each feature, and 1 for a constant one."""
        deviation = (self.spread / self.count.double()).sqrt()
        return deviation.where(~self.constant & (deviation > 0.0), 1.0)

    def __call__(self, data: Array) -> Tensor:
        """Standardise, in float64 where the device has it; the result has the type and device of the input."""
        values = _floating(data)
        if self.nan == "raise":
            _refuse_nonfinite(_columns(values, self.feature_axis).isfinite())
        mean, scale = self._aligned(values)
        result = ((values.to(mean.dtype) - mean) / scale).to(values.dtype)
        return result.where(values.isfinite(), 0.0) if self.nan == "fill" else result

    def undo(self, data: Array) -> Tensor:
        """Map standardised values back to the original scale."""
        values = _floating(data)
        mean, scale = self._aligned(values)
        return (values.to(mean.dtype) * scale + mean).to(values.dtype)

    def _aligned(self, values: Tensor) -> tuple[Tensor, Tensor]:
        if values.shape[self.feature_axis] != len(self.mean):
            raise ValueError(
                f"Fitted on {len(self.mean)} features; got {values.shape[self.feature_axis]} along axis "
                f"{self.feature_axis} of shape {tuple(values.shape)}."
            )
        shape = [1] * values.ndim
        shape[self.feature_axis] = -1
        dtype = torch.float32 if values.device.type == "mps" else torch.float64
        mean, scale = (part.view(shape).to(device=values.device, dtype=dtype) for part in (self.mean, self.scale))
        return mean, scale

    def save(self, path: str | Path) -> None:
        """Write the statistics as JSON, exactly, under a temporary name that is then put in place."""
        content = {
            "format": "surefoot.Standardizer",
            "version": STANDARDIZER.version,
            "feature_axis": self.feature_axis,
            "nan": self.nan,
            **{name: getattr(self, name).tolist() for name in _SAVED},
        }
        path = Path(path)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        temporary.write_text(json.dumps(content), encoding="utf-8")
        temporary.replace(path)

    @classmethod
    def load(cls, path: str | Path) -> "Standardizer":
        """Read what `save` wrote; the file holds numbers only, so one from a stranger can be read safely."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is not JSON, so not a saved Standardizer: {error}.") from error
        if not isinstance(content, dict) or content.get("format") != "surefoot.Standardizer":
            raise ValueError(f"{path} is not a saved Standardizer.")
        content = STANDARDIZER.read(content, str(path), ValueError)
        mean, spread, lowest, highest = (torch.tensor(content[name], dtype=torch.float64) for name in _SAVED[1:])
        count = torch.tensor(content["count"], dtype=torch.int64)
        return cls(count, mean, spread, lowest, highest, content["feature_axis"], content["nan"])


_SAVED = ("count", "mean", "spread", "lowest", "highest")


class _Copied:
    """A tensor of an object, copied when it is set and when it is read: in-place changes do not reach it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, instance: "Standardizer", owner: type) -> Tensor:
        value: Tensor = vars(instance)[self._name]
        return value.clone()

    def __set__(self, instance: "Standardizer", value: Tensor) -> None:
        vars(instance)[self._name] = value.clone()


for _name in _SAVED:
    setattr(Standardizer, _name, _Copied(_name))


def _columns(values: Tensor, feature_axis: int) -> Tensor:
    """Lay out as a table: one row per sample and position, one column per feature."""
    features = values.movedim(feature_axis, -1)
    return features.reshape(-1, features.shape[-1])


def _floating(data: Array) -> Tensor:
    values = torch.as_tensor(data)
    if values.is_floating_point():
        return values
    if values.dtype == torch.uint8:
        raise TypeError("Got uint8, which looks like raw image bytes. Use `normalize_images`, or divide by 255 first.")
    raise TypeError(
        f"Got {values.dtype}: integers are refused because they are usually token ids or categories, which are names "
        "and not amounts; the mean of two words is not a word. Feed ids to `nn.Embedding`. If these really are amounts "
        "(counts, ages), pass them with `.float()`."
    )


def _refuse_nonfinite(finite: Tensor) -> None:
    bad = (~finite).sum(0)
    if bool(bad.any()):
        columns = bad.nonzero().flatten().tolist()
        raise ValueError(
            f"The data contains NaN or Inf ({count_of(int(bad.sum()), 'value')}) in features {columns[:10]}. "
            "Clean it, or choose `nan='ignore'` (they stay) or `nan='fill'` (they become the mean)."
        )
