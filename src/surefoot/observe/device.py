"""`DeviceMonitor`: one reading of the host and of every GPU this process computes on, every few seconds.

For the thread that writes the run log, never for the one that trains. A GPU is read once the process has a context on
it: reading never creates one, never waits for the device, and uses no memory there. torch provides the numbers of its
allocator, the driver the rest (`observe/nvml.py`), and `/proc` the memory of the host (`observe/host.py`). Missing
hardware has no readings. `DeviceAlarms` decides which readings are reported.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, NamedTuple

from surefoot.observe.host import HostMemory
from surefoot.observe.nvml import Nvml, NvmlDevice

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch


class DeviceReading(NamedTuple):
    """One reading of one source. The first four fields are those of the run log's `DeviceRow`."""

    time: float
    """Seconds since the epoch."""
    source: str
    """`host`, or the name of a device as torch prints it."""
    step: int | None
    numbers: Mapping[str, float]
    xids: tuple[int, ...] = ()
    """Critical errors that the driver has reported since the last reading."""


class DeviceMonitor:
    """Reads host and devices. Not thread-safe.

    >>> host, *devices = DeviceMonitor().read(step=0)
    >>> host.source
    'host'
    """

    def __init__(self) -> None:
        self._host = HostMemory()
        self._nvml: Nvml | None = None
        self._cards: dict[torch.device, NvmlDevice | None] = {}

    def read(self, step: int | None = None) -> list[DeviceReading]:
        """One reading per source that has numbers, the host first."""
        now = time.time()
        found = [DeviceReading(now, "host", step, self._host.read())]
        found += [self._read_card(now, device, step) for device in _devices_in_use()]
        return [reading for reading in found if reading.numbers or reading.xids]

    def close(self) -> None:
        """Close the driver's library."""
        for card in self._cards.values():
            if card is not None:
                card.close()
        self._cards = {}
        if self._nvml is not None:
            self._nvml.close()
            self._nvml = None

    def _read_card(self, now: float, device: torch.device, step: int | None) -> DeviceReading:
        from surefoot.core.device import memory_counters, uuid_of

        if device not in self._cards:
            self._nvml = self._nvml or Nvml()
            self._cards[device] = self._nvml.device(uuid_of(device))
        card = self._cards[device]
        numbers = memory_counters(device)
        if card is None:
            return DeviceReading(now, str(device), step, numbers)
        return DeviceReading(now, str(device), step, numbers | card.numbers(), card.xids())


def _devices_in_use() -> list[torch.device]:
    """The devices that this process computes on; none before torch is imported and uses one."""
    if "torch" not in sys.modules:
        return []
    from surefoot.core.device import devices_in_use

    return devices_in_use()
