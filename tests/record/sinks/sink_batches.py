"""Batches that a run writes, healthy and hostile, shared by the tests of the sinks."""

from __future__ import annotations

from surefoot.record.bins import COUNT, ZERO
from surefoot.record.messages import Batch, DeviceRow, Event, Histogram, LayerRows, StepRow

NAN, INF = float("nan"), float("inf")
TIME = 1_700_000_000.0


def step(number: int, loss: float | None = 1.0, part: str = "", **fields) -> StepRow:
    return StepRow(step=number, time=TIME + number, part=part, loss=loss, **fields)


def event(name: str = "skip", number: int | None = 3, summary: str = "a NaN gradient", **fields) -> Event:
    return Event(event=name, step=number, summary=summary, time=TIME, **fields)


def histogram(number: int = 3, layer: str = "fc.weight", **fields) -> Histogram:
    counts = [0] * COUNT
    counts[ZERO - 1], counts[ZERO], counts[ZERO + 30] = 3, 4, 5
    return Histogram(step=number, kind="weight", layer=layer, counts=counts, **fields)


def healthy(first: int = 0, count: int = 5) -> Batch:
    """Every kind of row: a few steps, layers, a histogram, a device, an event."""
    return Batch(
        steps=[
            step(i, 1.0 / (i + 1), grad_norm=2.0, lr=1e-3, signals={"kl": 0.5}) for i in range(first, first + count)
        ],
        layers=[LayerRows(first, ("fc.weight", "fc.bias"), {"grad_norm": [0.5, 0.25], "update_ratio": [1e-3, NAN]})],
        histograms=[histogram(first, nan=2)],
        devices=[DeviceRow(TIME, "host", None, {"host_used": 1e9})],
        events=[event(number=first + count - 1, severity="error", cause="nonfinite", action="skipped the step")],
    )


def strange() -> list[Batch]:
    """What nobody meant to write."""
    names = (
        "x" * 5000,
        "漢字/é",
        "<img src=x onerror=alert(1)>",
        "a//b",
        "/",
        "..",
        "",
        "lone \ud800 surrogate",
        "*.*",
    )
    return [
        Batch(),
        Batch(steps=[step(1, NAN, grad_norm=INF, lr=-INF, nonfinite=3.0, skipped=True)]),
        Batch(steps=[step(2, None), StepRow(step=3, time=TIME)]),
        Batch(steps=[step(4, 1e300, signals=dict.fromkeys(names, NAN)), step(4, 1.0), step(1, 1.0)]),
        Batch(layers=[LayerRows(5, names, {"grad_norm": [NAN] * len(names), "dead_share": []})]),
        Batch(layers=[LayerRows(6, (), {})]),
        Batch(histograms=[Histogram(7, "gradient", name, [0] * COUNT, nan=9) for name in names]),
        Batch(histograms=[histogram(8, name) for name in names]),
        Batch(steps=[step(9, part=name) for name in names]),
        Batch(devices=[DeviceRow(TIME, "cuda:0", None, {"temperature": NAN})]),
        Batch(events=[event("halt", None, name, severity="error", cause=name, part=name) for name in names]),
        Batch(events=[event("finding", 2**40, "x" * 100_000, evidence={"incident": NAN, "odd": object()})]),
    ]
