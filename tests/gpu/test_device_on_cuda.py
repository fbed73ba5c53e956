"""Readings of a real card. Left out where there is none."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
import torch

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


def test_reading_never_waits_for_the_device_and_is_quick():
    torch.ones(1, device="cuda")
    monitor = DeviceMonitor()
    card(monitor)
    times = []
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(4_000_000_000)  # seconds of work that a wait would have to sit through
        for _ in range(20):
            start = time.perf_counter()
            card(monitor)
            times.append(time.perf_counter() - start)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    print(f"\na reading of host and card: median {sorted(times)[10] * 1e3:.2f} ms")
    assert sorted(times)[10] < 50e-3


def test_a_process_that_does_not_use_cuda_is_not_made_to():
    code = (
        "import torch; from surefoot.observe.device import DeviceMonitor; "
        "assert [r.source for r in DeviceMonitor().read()] == ['host']; assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
