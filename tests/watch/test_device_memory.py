"""Memory is noted after the first steps and then ever more rarely; without an accelerator there is nothing to note."""

from __future__ import annotations

import pytest
import torch

from surefoot.watch.device_memory import FIRST_STEPS, DeviceMemory
from surefoot.watch.watch_state import WatchState


def test_a_long_run_has_a_bounded_number_of_notes() -> None:
    state = WatchState()
    memory = DeviceMemory(state)
    noted = []
    for state.steps in range(200_000):
        before = memory._next
        memory.after_step()
        if memory._next != before:
            noted.append(state.steps)
    assert noted[: FIRST_STEPS + 1] == list(range(FIRST_STEPS + 1))
    assert 60 < len(noted) < 130


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_without_an_accelerator_nothing_is_noted() -> None:
    memory = DeviceMemory(WatchState())
    memory.after_step()
    assert memory.held == []
