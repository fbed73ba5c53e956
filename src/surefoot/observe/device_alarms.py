"""Which device readings are reported: memory errors, driver errors, lasting throttling, full memory.

An alarm is about a change during the run. Errors that a card had counted before the run, a power cap (normal for most
data-centre cards), and clocks that fall while nothing is computed are not reported. A lasting condition is reported
once, and again only after it has ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from surefoot.observe.device import DeviceReading
    from surefoot.types import Severity

LASTING_READINGS = 3
"""The number of consecutive throttled readings before a warning; on healthy machines it lasts for seconds."""
NEARLY_FULL, NO_LONGER_FULL = 0.97, 0.90

THROTTLING = {
    0x20: "the driver lowers the clocks because the card is hot",
    0x40: "the hardware halves the clocks because the card is too hot",
    0x80: "the power supply makes the hardware lower the clocks",
}
"""NVML's reasons that are reported. Not included: idle, clock settings, power caps, sync boost, and the general
hardware slowdown, which also appears briefly whenever clocks change."""

XIDS = {
    13: "a kernel failed, most often by an access outside its memory",
    31: "a kernel touched memory that is not mapped",
    43: "the driver stopped a program's work on the card",
    45: "the driver removed a program's work from the card, after an error or a kill",
    48: "an uncorrectable memory error",
    61: "an internal controller of the card failed",
    62: "an internal controller of the card stopped",
    63: "a bad memory row will be replaced at the next reset",
    64: "a bad memory row could not be replaced: the card needs service",
    74: "an NVLink error",
    79: "the card has fallen off the bus: nothing will run on it until a restart",
    92: "many corrected memory errors",
    94: "an uncorrectable memory error that hit one program only",
    95: "an uncorrectable memory error that may have hit every program: reset the card",
    119: "the card's system processor does not answer: reset the card",
    120: "the card's system processor failed: reset the card",
}
OF_A_PROGRAM = frozenset({13, 31, 43, 45, 68, 69, 109})
"""Errors that a program causes, this one or another on the same card; the card itself works."""


class Notice(NamedTuple):
    """One message; the fields of an `Event`."""

    summary: str
    severity: Severity
    cause: str
    evidence: Mapping[str, Any]


class DeviceAlarms:
    """Follows the readings of a run and reports what is new in them."""

    def __init__(self) -> None:
        self._before: dict[str, Mapping[str, float]] = {}
        self._throttled: dict[str, int] = {}
        self._full: set[str] = set()

    def take(self, readings: Sequence[DeviceReading]) -> list[Notice]:
        """The messages for these readings."""
        found: list[Notice] = []
        for reading in readings:
            found += self._driver_errors(reading)
            found += self._memory_errors(reading)
            found += self._throttling(reading)
            found += self._full_memory(reading)
            self._before[reading.source] = reading.numbers
        return found

    def _driver_errors(self, reading: DeviceReading) -> Iterator[Notice]:
        for number in dict.fromkeys(reading.xids):
            meaning = XIDS.get(number, "see NVIDIA's list of XID errors")
            severity: Severity = "warning" if number in OF_A_PROGRAM else "error"
            evidence = {"source": reading.source, "xid": number, "times": reading.xids.count(number)}
            yield Notice(f"{reading.source}: the driver reports XID {number}, {meaning}", severity, "xid", evidence)

    def _memory_errors(self, reading: DeviceReading) -> Iterator[Notice]:
        now, before = (
            numbers.get("ecc_uncorrected") for numbers in (reading.numbers, self._before.get(reading.source, {}))
        )
        if now is not None and before is not None and now > before:
            evidence = {"source": reading.source, "new": int(now - before), "total": int(now)}
            summary = f"{reading.source}: {int(now - before)} uncorrectable memory errors: results may be wrong"
            yield Notice(summary, "error", "ecc", evidence)

    def _throttling(self, reading: DeviceReading) -> Iterator[Notice]:
        bits = int(reading.numbers.get("throttle", 0))
        reasons = [meaning for bit, meaning in THROTTLING.items() if bits & bit]
        lasted = self._throttled.get(reading.source, 0) + 1 if reasons else 0
        self._throttled[reading.source] = lasted
        if lasted == LASTING_READINGS:
            shown = ("temperature", "power", "sm_clock")
            evidence = {"source": reading.source, "throttle": bits}
            evidence |= {name: reading.numbers[name] for name in shown if name in reading.numbers}
            summary = f"{reading.source} is slowed down: {'; '.join(reasons)}"
            yield Notice(summary, "warning", "throttling", evidence)

    def _full_memory(self, reading: DeviceReading) -> Iterator[Notice]:
        host = reading.source == "host"
        used, total = (reading.numbers.get(name) for name in _MEMORY["host" if host else "device"])
        if used is None or not total:
            return
        share = used / total
        if share < NO_LONGER_FULL:
            self._full.discard(reading.source)
        if share < NEARLY_FULL or reading.source in self._full:
            return
        self._full.add(reading.source)
        evidence = {"source": reading.source, "used": used, "total": total}
        what = f"{reading.source}: {share:.0%} of {total / 2**30:,.1f} GiB of memory in use"
        if host:
            yield Notice(f"{what}: the system may end the process", "warning", "memory", evidence)
        else:
            yield Notice(what, "info", "memory", evidence)


_MEMORY = {"host": ("host_used", "host_total"), "device": ("memory_used", "memory_total")}
