"""Charts of the machine: memory, temperature, power, clocks and load of each device and of the host, over the steps.

The page has one axis, the step. A reading is assigned to the step that was running at its time. If a step has several
readings, the largest is shown.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from surefoot.report.page.charts import one_series, without_constants
from surefoot.report.page.columns import coded, measured, whole_numbers

if TYPE_CHECKING:
    import pyarrow as pa

    from surefoot.report.page.columns import Numbers
    from surefoot.report.page.sections import PageChart, PageSeries

_CHARTS: tuple[tuple[str, str, str, tuple[str, ...], str], ...] = (
    (
        "device-memory",
        "Device memory",
        "bytes",
        ("allocated", "reserved", "peak", "memory_used"),
        "In tensors, reserved by the allocator, and in use on the whole device.",
    ),
    ("host-memory", "Host memory", "bytes", ("process_memory", "host_used"), "Of this process and of the machine."),
    ("temperature", "Temperature", "°C", ("temperature",), ""),
    ("power", "Power", "W", ("power", "power_limit"), ""),
    ("clocks", "Clocks", "MHz", ("sm_clock", "memory_clock"), ""),
    ("utilization", "Load", "share", ("utilization",), "Share of time that the device was busy."),
    ("ecc", "Memory errors", "", ("ecc_corrected", "ecc_uncorrected"), "ECC error count."),
    (
        "throttle",
        "Throttling",
        "",
        ("throttle",),
        "Nonzero: the device reduced its clocks (NVML's reason bits).",
    ),
)
_HIDDEN_AT_ZERO = {"ecc", "throttle"}
"""Shown only if they are not always zero."""


def device_charts(table: pa.Table, scalars: pa.Table) -> list[PageChart]:
    """The charts that have data."""
    if not table.num_rows:
        return []
    steps = _steps(table, scalars)
    sources, names = coded(table, "source")
    found = []
    for identity, title, unit, columns, caption in _CHARTS:
        series = [one for name in columns for one in _series(table, name, steps, sources, names)]
        hidden = identity in _HIDDEN_AT_ZERO and not any(value for one in series for value in one["y"])
        if series and not hidden:
            chart: PageChart = {
                "id": identity,
                "title": title,
                "unit": unit,
                "caption": caption,
                "log": False,
                "series": series,
            }
            found.append(without_constants(chart))
    return found


def _steps(table: pa.Table, scalars: pa.Table) -> Numbers:
    times = measured(table, "time")
    clock, ticks = _clock(scalars)
    if times is not None and len(clock):
        return np.asarray(np.rint(np.interp(times[0], clock, ticks)), dtype=np.int64)
    given = measured(table, "step")
    known = np.zeros(table.num_rows) if given is None else np.where(given[1], given[0], 0)
    return np.asarray(known, dtype=np.int64)


def _clock(scalars: pa.Table) -> tuple[Numbers, Numbers]:
    """The times and steps of the logged rows."""
    times = measured(scalars, "time") if scalars.num_rows else None
    if times is None:
        return np.zeros(0), np.zeros(0)
    valid = times[1] & np.isfinite(times[0])
    clock, steps = times[0][valid], whole_numbers(scalars, "step")[valid]
    order = np.argsort(clock, kind="stable")
    return clock[order], steps[order].astype(np.float64)


def _series(table: pa.Table, name: str, steps: Numbers, sources: Numbers, names: list[str]) -> list[PageSeries]:
    column = measured(table, name)
    if column is None:
        return []
    found = []
    for code, source in enumerate(names):
        rows = np.flatnonzero((sources == code) & column[1])
        if len(rows):
            rows = rows[np.argsort(steps[rows], kind="stable")]
            distinct, first = np.unique(steps[rows], return_index=True)
            largest = np.maximum.reduceat(column[0][rows], first)
            found.append(one_series(name.replace("_", " "), source, "line", distinct, largest, ()))
    return found
