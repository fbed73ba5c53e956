"""Converts a batch for the sinks: named numbers per step, histograms, and events with a count of each kind.

The names are defined here, so that a curve has the same name in TensorBoard, W&B and MLflow:

- `loss`, `grad_norm`, `clip_factor`, `lr`, `loss_scale`, `nonfinite`, `skipped` (0 or 1): what was measured at a step;
- `signal/<name>`: the user's own;
- `layer_<column>/<layer>`: per layer, `layer_grad_norm/blocks.0.weight`;
- `histogram_<kind>/<layer>`, and `histogram_<kind>_nonfinite/<layer>` for the NaN and Inf that are in no bin;
- `device/<source>/<column>`;
- `events/<event>`: the number of events so far.

If a run has several parts, each name begins with the part: `generator/loss`. NaN and Inf stay as they are.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from surefoot.errors import require

if TYPE_CHECKING:
    from surefoot.record.messages import Batch, DeviceRow, Event, Histogram, LayerRows, StepRow

COLUMNS = ("loss", "grad_norm", "clip_factor", "lr", "loss_scale", "nonfinite")
DIGEST_LENGTH = 9


@dataclass(frozen=True)
class Point:
    """Numbers of one step, by name; `part` is a prefix of each."""

    step: int
    time: float
    part: str
    values: Mapping[str, float]


@dataclass(frozen=True)
class PlacedItem:
    """An event or a histogram, with a step and a time, even if it has none itself."""

    step: int
    time: float
    part: str
    item: Any


@dataclass(frozen=True)
class NamedValues:
    """A converted batch."""

    points: list[Point] = field(default_factory=list)
    histograms: list[PlacedItem] = field(default_factory=list)
    events: list[PlacedItem] = field(default_factory=list)


class BatchReader:
    """Converts batches; remembers what the next one needs: counts, the last step, and what was thinned."""

    def __init__(self, every_steps: int = 1, layers_every_steps: int = 100) -> None:
        require(every_steps >= 1, f"`every_steps` must be at least 1; got {every_steps}.")
        require(layers_every_steps >= 0, f"`layers_every_steps` must be 0 (none) or more; got {layers_every_steps}.")
        self._every_steps = every_steps
        self._layers_every_steps = layers_every_steps
        self._last_kept: dict[tuple[str, str], int] = {}
        self._counts: Counter[tuple[str, str]] = Counter()
        self._step = 0
        self._latest: tuple[Batch, NamedValues] | None = None

    def read(self, batch: Batch) -> NamedValues:
        """Convert a batch. Converting it again (a second attempt) gives the same result: nothing counts twice."""
        if self._latest is None or self._latest[0] is not batch:
            self._latest = (batch, self._fresh(batch))
        return self._latest[1]

    def _fresh(self, batch: Batch) -> NamedValues:
        reading = NamedValues()
        for row in batch.steps:
            self._step = int(row.step)
            if self._is_due("", row.part, row.step, self._every_steps) or row.skipped or bool(row.nonfinite):
                reading.points.append(Point(row.step, row.time, row.part, dict(_numbers(row))))
        now = batch.steps[-1].time if batch.steps else time.time()
        reading.points.extend(self._of_layers(batch.layers, now))
        reading.points.extend(self._of_device(row) for row in batch.devices)
        for histogram in batch.histograms:
            reading.histograms.append(PlacedItem(histogram.step, now, histogram.part, histogram))
        reading.points.extend(_nonfinite_of(batch.histograms, now))
        for event in batch.events:
            reading.events.append(self._place(event))
            reading.points.append(self._count(event))
        return reading

    def _is_due(self, kind: str, part: str, step: int, every: int) -> bool:
        last = self._last_kept.get((kind, part))
        due = last is None or step <= last or step >= last + every  # a step that goes back follows a rollback
        if due:
            self._last_kept[kind, part] = step
        return due

    def _of_layers(self, rows: Iterable[LayerRows], now: float) -> Iterator[Point]:
        for row in rows:
            kind = " ".join(row.columns)  # numbers that are measured at other steps are thinned separately
            if self._layers_every_steps and self._is_due(kind, row.part, row.step, self._layers_every_steps):
                yield Point(row.step, now, row.part, dict(_layer_numbers(row)))

    def _of_device(self, row: DeviceRow) -> Point:
        values = {
            f"device/{row.source}/{name}": float(value) for name, value in row.numbers.items() if value is not None
        }
        return Point(self._step if row.step is None else row.step, row.time, "", values)

    def _place(self, event: Event) -> PlacedItem:
        return PlacedItem(self._step if event.step is None else event.step, event.time, event.part, event)

    def _count(self, event: Event) -> Point:
        self._counts[event.part, event.event] += 1
        count = self._counts[event.part, event.event]
        return Point(self._place(event).step, event.time, event.part, {f"events/{event.event}": float(count)})


def full_name(part: str, name: str) -> str:
    """The name of a curve, prefixed with its part."""
    return encodable(f"{part}/{name}" if part else name)


def encodable(text: str) -> str:
    """The text with characters that cannot be encoded (lone surrogates, as in odd file names) replaced."""
    return text.encode("utf-8", "replace").decode()


def shortened(name: str, longest: int) -> str:
    """A name shortened to a length, with a digest of the whole name, so that two long names stay different."""
    return name if len(name) <= longest else f"{name[: longest - DIGEST_LENGTH]}{digest(name)}"


def digest(name: str) -> str:
    """A few characters that differ between names: `-1f0c9a2b`."""
    return f"-{hashlib.blake2s(name.encode('utf-8', 'replace')).hexdigest()[: DIGEST_LENGTH - 1]}"


def sentence(event: Event) -> str:
    """One line of plain text about an event."""
    at = "" if event.step is None else f"step {event.step}: "
    cause = f" (cause: {event.cause})" if event.cause else ""
    action = f" Action: {event.action}." if event.action else ""
    return encodable(f"{at}{event.summary}{cause}{action}")


def _numbers(row: StepRow) -> Iterator[tuple[str, float]]:
    for name in COLUMNS:
        value = getattr(row, name)
        if value is not None:
            yield name, float(value)
    yield "skipped", float(row.skipped)
    for name, value in row.signals.items():
        if value is not None:
            yield f"signal/{name}", float(value)


def _layer_numbers(rows: LayerRows) -> Iterator[tuple[str, float]]:
    for column, values in rows.columns.items():
        plain = values.tolist() if hasattr(values, "tolist") else values
        for layer, value in zip(rows.names, plain, strict=False):
            if value is not None:
                yield f"layer_{column}/{layer}", float(value)


def _nonfinite_of(histograms: Iterable[Histogram], now: float) -> Iterator[Point]:
    for histogram in histograms:
        count = histogram.nan + histogram.positive_inf + histogram.negative_inf
        if count:
            name = f"histogram_{histogram.kind}_nonfinite/{histogram.layer}"
            yield Point(histogram.step, now, histogram.part, {name: float(count)})
