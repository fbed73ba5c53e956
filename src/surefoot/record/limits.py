"""Limits for the size of a run log, independent of the length of the run."""

from __future__ import annotations

from dataclasses import dataclass

from surefoot.core.settings import shown
from surefoot.errors import require

MEBIBYTE = 1 << 20
SMALLEST = 1 << 16


@dataclass(frozen=True)
class LogLimits:
    """The maximum size of each table on disk, in bytes. Old rows are thinned to stay below it (`record/thinning.py`).

    The figures are those of a run of a million steps with 300 layers, whose layers are sampled at every tenth step.
    """

    scalars_bytes: int = 16 * MEBIBYTE
    """One row per step: the last 70,000 are all there, then every 8th, then every 64th; 4 MiB in all."""
    layers_bytes: int = 64 * MEBIBYTE
    """One row per layer and sampled step: the last 1,200 sampled steps are all there; 23 MiB in all."""
    histograms_bytes: int = 32 * MEBIBYTE
    """About 400 bytes each before compression."""
    device_bytes: int = 8 * MEBIBYTE
    """One row per device and reading."""

    def __post_init__(self) -> None:
        for name in ("scalars_bytes", "layers_bytes", "histograms_bytes", "device_bytes"):
            got = getattr(self, name)
            require(
                isinstance(got, int) and got >= SMALLEST,
                f"`{name}` must be at least {SMALLEST:,} bytes, to hold a few segments; got {shown(got)}.",
            )

    def of(self, table: str) -> int:
        """The limit of one table."""
        return int(getattr(self, f"{table}_bytes"))
