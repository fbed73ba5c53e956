"""Readings of the host and devices as rows and events of the run log."""

from surefoot.record.log import DeviceReadings
from surefoot.record.messages import DeviceRow


def test_every_call_reads_the_host_once():
    source = DeviceReadings()
    rows = [row for row in source() if isinstance(row, DeviceRow)]
    assert rows[0].source == "host"
    assert rows[0].numbers["process_memory"] > 0
    assert len([row for row in source() if isinstance(row, DeviceRow)]) == len(rows)
