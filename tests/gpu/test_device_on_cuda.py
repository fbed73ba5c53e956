"""Readings of a real card. Left out where there is none."""

from __future__ import annotations

import sys

import pytest
import torch

import patience
from surefoot.observe.device import DeviceMonitor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def card(monitor):
    return next(each for each in monitor.read(step=0) if each.source == "cuda:0")


def test_the_card_tells_what_torch_has_allocated():
    held = torch.ones(64 * 2**20, dtype=torch.uint8, device="cuda")
    numbers = card(DeviceMonitor()).numbers
    assert numbers["allocated"] == torch.cuda.memory_allocated() >= held.numel()
    assert numbers["allocated"] <= numbers["reserved"]
    assert numbers["allocated"] <= numbers["peak"]


def test_the_driver_tells_the_rest_in_the_units_of_the_log():
    pytest.importorskip("pynvml")
    torch.ones(1, device="cuda")
    monitor = DeviceMonitor()
    numbers = card(monitor).numbers
    properties = torch.cuda.get_device_properties(0)
    assert numbers["memory_total"] == pytest.approx(properties.total_memory, rel=0.05)
    assert numbers["reserved"] <= numbers["memory_used"] <= numbers["memory_total"]
    assert 0 <= numbers.get("utilization", 0) <= 1
    assert 10 < numbers.get("temperature", 40) < 120
    assert 5 < numbers.get("power", 50) < 2000
    assert 50 < numbers.get("sm_clock", 1000) < 5000
    assert card(monitor).xids == ()
    monitor.close()


def test_reading_never_waits_for_the_device():
    torch.ones(1, device="cuda")
    monitor = DeviceMonitor()
    card(monitor)
    is_idle = torch.cuda.Event()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(10_000_000_000)  # seconds of work that a wait would have to sit through
        is_idle.record()
        card(monitor)
        assert not is_idle.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_process_that_does_not_use_cuda_is_not_made_to():
    code = (
        "import torch; from surefoot.observe.device import DeviceMonitor; "
        "assert [r.source for r in DeviceMonitor().read()] == ['host']; assert not torch.cuda.is_initialized()"
    )
    patience.run([sys.executable, "-c", code], check=True)
