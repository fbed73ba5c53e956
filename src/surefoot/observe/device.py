"""`DeviceMonitor`: one reading of the host and of every GPU this process computes on, every few seconds.

Meant for the thread that writes the run log, never for the one that trains. A GPU is read once the process has a CUDA
context on it: looking never creates one, never waits for the device, and takes no memory there. torch tells what its
allocator holds, the driver the rest (`observe/nvml.py`), `/proc` the memory of the host (`observe/host.py`). Hardware
that is absent is silence. `DeviceAlarms` says which readings a person should hear of.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from surefoot.observe.host import HostMemory
from surefoot.observe.nvml import Nvml, NvmlDevice

if TYPE_CHECKING:
    from collections.abc import Mapping


class DeviceReading(NamedTuple):
    """What one source told. The first four fields are those of the run log's `DeviceRow`."""

    time: float
    """Seconds since the epoch."""
    source: str
    """`host`, `cuda:0`, …"""
    step: int | None
    numbers: Mapping[str, float]
    xids: tuple[int, ...] = ()
    """Critical errors the driver has reported since the last reading."""


class DeviceMonitor:
    """Reads host and devices. Not meant to be called from two threads at once.

    >>> host, *devices = DeviceMonitor().read(step=0)
    >>> host.source
    'host'
    """

    def __init__(self) -> None:
        self._host = HostMemory()
        self._nvml: Nvml | None = None
        self._cards: dict[int, NvmlDevice | None] = {}

    def read(self, step: int | None = None) -> list[DeviceReading]:
        """One reading per source that tells anything, the host first."""
        now = time.time()
        found = [DeviceReading(now, "host", step, self._host.read())]
        found += [self._read_card(now, index, step) for index in _devices_in_use()]
        return [reading for reading in found if reading.numbers or reading.xids]

    def close(self) -> None:
        """Let go of the driver's library."""
        for card in self._cards.values():
            if card is not None:
                card.close()
        self._cards = {}
        if self._nvml is not None:
            self._nvml.close()
            self._nvml = None

    def _read_card(self, now: float, index: int, step: int | None) -> DeviceReading:
        if index not in self._cards:
            self._nvml = self._nvml or Nvml()
            self._cards[index] = self._nvml.device(_uuid(index))
        card = self._cards[index]
        numbers = _allocator(index)
        if card is None:
            return DeviceReading(now, f"cuda:{index}", step, numbers)
        return DeviceReading(now, f"cuda:{index}", step, numbers | card.numbers(), card.xids())


def _devices_in_use() -> list[int]:
    """The devices this process has a CUDA context on; none before it uses CUDA."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return []
    return [i for i in range(torch.cuda.device_count()) if torch._C._cuda_hasPrimaryContext(i)]


def _uuid(index: int) -> str:
    torch: Any = sys.modules["torch"]
    return str(getattr(torch.cuda.get_device_properties(index), "uuid", ""))


def _allocator(index: int) -> dict[str, float]:
    """What torch's allocator has given out, holds, and has given out at most: counters it keeps anyway."""
    torch: Any = sys.modules["torch"]
    counters = torch.cuda.memory_stats_as_nested_dict(index)
    try:
        allocated, reserved = counters["allocated_bytes"]["all"], counters["reserved_bytes"]["all"]
    except KeyError:  # an allocator of the user's own keeps no such counters
        return {}
    return {
        "allocated": float(allocated["current"]),
        "reserved": float(reserved["current"]),
        "peak": float(allocated["peak"]),
    }
