"""The memory of the accelerator after steps, which shows what grew, and since when, if it runs out.

The numbers are counters of torch's allocator on the host: nothing waits for the device. The first steps are recorded,
then each one a tenth further into the run than the one before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from surefoot.core.device import devices_in_use, memory_counters
from surefoot.record.facts import HeldMemory

if TYPE_CHECKING:
    import torch

    from surefoot.watch.watch_state import WatchState

FIRST_STEPS = 16
GROWTH = 1.1


class DeviceMemory:
    """Records the allocator's counters after some of the steps."""

    def __init__(self, state: WatchState) -> None:
        self._state = state
        self._next = 0
        self._devices: list[torch.device] = []
        self.held: list[HeldMemory] = []

    @property
    def is_due(self) -> bool:
        """Whether to record the counters after the current step."""
        return self._state.steps >= self._next

    def after_step(self) -> None:
        """Record the counters after a step."""
        if not self.is_due:
            return
        step = self._state.steps
        self._next = step + 1 if step < FIRST_STEPS else int(GROWTH * step) + 1
        self._devices = self._devices or devices_in_use()
        counters = [(device, memory_counters(device)) for device in self._devices]
        self.held += [
            HeldMemory(step=step, device=str(device), allocated=found["allocated"], peak=found["peak"])
            for device, found in counters
            if found
        ]
