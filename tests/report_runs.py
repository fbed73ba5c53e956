"""Runs for the report's tests, written through the real run log: a rough one with everything in it, and a quiet one."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np

import surefoot
from histogram_bins import bin_of
from surefoot.record.bins import COUNT
from surefoot.record.messages import DeviceRow, Event, Histogram, LayerRows, StepRow

if TYPE_CHECKING:
    from pathlib import Path

    from surefoot.record.log import RunLog

BEGAN = 1_760_000_000.0
LAYERS = [
    f"transformer.blocks.{block}.{what}.weight"
    for block in range(4)
    for what in ("attention.query_key_value", "attention.projection", "feed_forward.expand", "feed_forward.contract")
]
FINDING: dict[str, Any] = {
    "cause": "lr.too-high",
    "severity": "error",
    "confidence": 0.9,
    "step": 120,
    "where": ["train.py:31"],
    "evidence": {"lr": 1.0, "ratios": [{"step": 1, "ratio": 0.5}, {"step": 2, "ratio": "inf"}], "peak": "nan"},
    "summary": "At a learning rate of 1 the loss rises.",
    "fixes": ["Divide the rate by 10: `lr=0.1`.", "Warm up."],
}


def write_findings(folder: Path, *findings: dict[str, Any], verdict: str = "broken", steps: int = 400) -> None:
    value = {"schema": 1, "verdict": verdict, "steps": steps, "findings": list(findings)}
    (folder / "findings.json").write_text(json.dumps(value), encoding="utf-8")


def describe(folder: Path, **changes: Any) -> None:
    facts = {"schema": 1, "script": "train.py", "arguments": ["--lr", "1"], "started": "2026-01-02T03:04:05+0000"}
    facts |= {"exit_code": 0, "error": None, "seconds": 81.5, "torch": "2.13.0", **changes}
    (folder / "run.json").write_text(json.dumps(facts), encoding="utf-8")


def rough(folder: Path, steps: int = 400) -> Path:
    """Two parts, clipping, skips, a spike of 1e20, NaN, histograms, a device: one of everything."""
    random = np.random.default_rng(0)
    with surefoot.RunLog(folder, device_seconds=None) as log:
        for number, part in enumerate(("generator", "discriminator")):
            for step in range(steps):
                log.part(part).take(_step(step, number, random))
        layers = [f"{part}.{name}" for part in ("generator", "discriminator") for name in LAYERS[:8]]
        for step in range(0, steps, 10):
            _look(log, step, layers, random)
        _happenings(log, steps)
    describe(folder)
    return folder


def quiet(folder: Path, steps: int = 200) -> Path:
    """A run that falls as it should."""
    random = np.random.default_rng(1)
    with surefoot.RunLog(folder, device_seconds=None) as log:
        for step in range(steps):
            loss = 2.3 * math.exp(-step / 60) + 0.1 + 0.02 * float(random.normal())
            log.take(StepRow(step=step, time=BEGAN + step * 0.2, loss=loss, grad_norm=0.4, lr=1e-3))
    describe(folder)
    write_findings(folder, verdict="healthy", steps=steps)
    return folder


def _step(step: int, number: int, random: np.random.Generator) -> StepRow:
    loss = 1.5 + number + math.exp(-step / 80) + 0.1 * float(random.normal())
    norm = float(np.exp(random.normal())) * 0.8
    if number == 0 and step == 120:
        loss = 1e20
    if number == 0 and step in (200, 201, 202):
        loss = norm = math.nan
    clip = min(1.0, 1.0 / norm) if math.isfinite(norm) else None
    rate = 1e-3 * min(1.0, (step + 1) / 50)
    skipped = not math.isfinite(loss)
    scale = 65536.0 if step < 201 else 32768.0
    signals = {"kl": 0.01 * float(random.normal()) + 0.1}
    return StepRow(step, BEGAN + step * 0.2, "", loss, norm, clip, rate, scale, 3.0 * skipped, skipped, signals)


def _look(log: RunLog, step: int, layers: list[str], random: np.random.Generator) -> None:
    count = len(layers)
    norms = np.exp(random.normal(size=count) - np.arange(count) / 3)
    bad = np.zeros(count)
    if step == 200:
        norms[3], bad[3] = math.nan, 5
    ratios = np.exp(random.normal(size=count)) * 1e-3
    log.take(LayerRows(step, layers, {"grad_norm": norms, "nonfinite": bad, "update_ratio": ratios}))
    units = [f"{name.removesuffix('.weight')}.act" for name in layers[::4]]
    log.take(LayerRows(step, units, {"dead_share": np.linspace(0, min(1, step / 300), len(units))}))
    for kind in ("weight", "gradient"):
        for layer in layers[:3]:
            log.take(_histogram(step, kind, layer, random))
    log.take(DeviceRow(BEGAN + step * 0.2, "cuda:0", step, {"allocated": 2e9 + step * 1e6, "temperature": 60.0}))
    log.take(DeviceRow(BEGAN + step * 0.2, "host", None, {"process_memory": 3e9, "host_used": 9e9}))


def _histogram(step: int, kind: Any, layer: str, random: np.random.Generator) -> Histogram:
    counts = [0] * COUNT
    for value in random.normal(size=200) * 0.05:
        counts[bin_of(float(value)) or 0] += 1
    return Histogram(step, kind, layer, counts, nan=7 if step == 200 else 0)


def _happenings(log: RunLog, steps: int) -> None:
    log.event("start", 0, "training begins")
    log.event("spike", 120, "The loss jumped to 1e20.", severity="warning", cause="spike")
    for step in (200, 201, 202):
        log.event("skip", step, f"Step {step} was left out: NaN.", severity="warning", cause="nonfinite", action="skip")
    log.event("rollback", 203, "Back to step 190.", severity="error", cause="nonfinite", action="rollback")
    log.event("checkpoint", steps // 2, "checkpoint written")
    log.take(Event("end", steps - 1, "the run ended", BEGAN + steps * 0.2))
