"""The readings of host and devices, as rows and events of the run log. Called by the log's own thread."""

from __future__ import annotations

import time

from surefoot.observe.device import DeviceMonitor
from surefoot.observe.device_alarms import DeviceAlarms
from surefoot.record.messages import DeviceRow, Event


class DeviceSource:
    """Reads everything once per call."""

    def __init__(self) -> None:
        self._monitor, self._alarms = DeviceMonitor(), DeviceAlarms()

    def __call__(self) -> list[DeviceRow | Event]:
        """All readings, and events for those that are reported."""
        readings = self._monitor.read()
        now = time.time()
        return [
            *(DeviceRow(reading.time, reading.source, reading.step, reading.numbers) for reading in readings),
            *(
                Event("alarm", None, note.summary, now, note.severity, note.cause, evidence=note.evidence)
                for note in self._alarms.take(readings)
            ),
        ]
