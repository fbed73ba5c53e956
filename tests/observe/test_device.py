"""Readings on a machine without a GPU."""

from __future__ import annotations

import sys

import pytest
import torch

import forked
import patience
from surefoot.observe.device import DeviceMonitor
from surefoot.record.messages import DeviceRow


def test_the_host_is_read_everywhere_and_fits_a_row_of_the_log():
    monitor = DeviceMonitor()
    host = monitor.read(step=3)[0]
    monitor.close()
    row = DeviceRow(*host[:4])
    assert (row.source, row.step, row.numbers) == ("host", 3, host.numbers)
    assert row.numbers["process_memory"] > 2**20


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a device")
def test_absent_hardware_is_silence():
    assert [each.source for each in DeviceMonitor().read()] == ["host"]


def test_reading_neither_imports_torch_nor_starts_cuda():
    read = "import sys; from surefoot.observe.device import DeviceMonitor; DeviceMonitor().read(); "
    patience.run([sys.executable, "-W", "error", "-c", f"{read}assert 'torch' not in sys.modules"], check=True)
    forked.run(["-W", "error", "-c", f"{read}import torch; assert not torch.cuda.is_initialized()"], check=True)
