"""All data of the page, as one JSON-like value in named sections.

A live page requests the sections that changed, a written page contains all of them; the same script draws both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Mapping
from typing import TYPE_CHECKING, Any

from surefoot.core.redaction import Redactor
from surefoot.report.page.charts import scalar_charts
from surefoot.report.page.device import device_charts
from surefoot.report.page.diagnosis import findings_of
from surefoot.report.page.experiments import experiments_of
from surefoot.report.page.histograms import layer_histograms
from surefoot.report.page.maps import layer_maps, rank_maps
from surefoot.report.page.summary import event_cards, head

if TYPE_CHECKING:
    from surefoot.record.messages import Event
    from surefoot.report.page.sections import EventRow, EventSection
    from surefoot.report.page.source import RunFolder

MOST_EVENTS = 20_000
"""The maximum number of events in the page.

If there are more, errors and the latest are kept, and the total is shown.
"""
_LONGEST = 2_000
"""The maximum length of a text, for example of a traceback in an event."""


_BUILDERS: dict[str, tuple[Callable[[RunFolder], Any], frozenset[str]]] = {
    "head": (head, frozenset({"run", "findings", "events", "scalars"})),
    "findings": (lambda source: findings_of(source.findings), frozenset({"findings"})),
    "experiments": (lambda source: experiments_of(source.experiments), frozenset({"experiments"})),
    "event_cards": (lambda source: event_cards(source.events), frozenset({"events"})),
    "events": (lambda source: _events(list(source.events)), frozenset({"events"})),
    "charts": (lambda source: scalar_charts(source.scalars, marked_steps(source)), frozenset({"scalars", "events"})),
    "maps": (
        lambda source: [*rank_maps(source.rank_table), *layer_maps(source.layers)],
        frozenset({"layers", "rank_table"}),
    ),
    "histograms": (lambda source: layer_histograms(source.histograms), frozenset({"histograms"})),
    "device": (lambda source: device_charts(source.device, source.scalars), frozenset({"device"})),
    "facts": (lambda source: _facts(source.run), frozenset({"run"})),
}
"""How each section is built, and the fields of a source that it depends on."""
_TEXTS = frozenset({"head", "findings", "experiments", "event_cards", "events", "facts"})
"""Sections with text; the others contain only numbers and names of layers."""


def sections(source: RunFolder, changed: Container[str] | None = None) -> dict[str, Any]:
    """All sections of the page, or only those that depend on fields that changed."""
    redact = Redactor(identity=False)  # a received folder may contain secrets
    return {
        name: redact.inside(build(source)) if name in _TEXTS else build(source)
        for name, (build, fields) in _BUILDERS.items()
        if changed is None or any(field in changed for field in fields)
    }


def marked_steps(source: RunFolder) -> set[int]:
    """The steps that a downsampled chart must keep."""
    steps = {event.step for event in _chosen(list(source.events)) if event.step is not None}
    return steps | {finding["step"] for finding in findings_of(source.findings) if finding["step"] is not None}


def _events(events: list[Event]) -> EventSection:
    return {"total": len(events), "list": [_event(event) for event in _chosen(events)]}


def _chosen(events: list[Event]) -> list[Event]:
    if len(events) <= MOST_EVENTS:
        return events
    errors = [event for event in events if event.severity == "error"][-MOST_EVENTS // 2 :]
    latest = events[-MOST_EVENTS // 2 :]
    chosen = {id(event) for event in [*errors, *latest]}
    return [event for event in events if id(event) in chosen]


def _event(event: Event) -> EventRow:
    row: EventRow = {
        "event": event.event,
        "step": event.step,
        "summary": str(event.summary)[:_LONGEST],
        "severity": event.severity,
    }
    if event.cause:
        row["cause"] = event.cause
    if event.action:
        row["action"] = event.action
    if event.part:
        row["part"] = event.part
    if event.time:
        row["time"] = round(event.time, 3)
    if event.evidence:
        row["evidence"] = dict(event.evidence)
    return row


def _facts(run: Mapping[str, object]) -> list[list[object]]:
    """The description of one run, without options that were off and without the rank of a single process."""
    alone = {"rank", "world_size"} if run.get("world_size") == 1 else set()
    return [row for row in description_rows(run) if row[1] is not False and row[0] not in alone]


def description_rows(run: Mapping[str, object], before: str = "") -> list[list[object]]:
    """The description of the run, one level deep: `versions.torch` and its value."""
    rows: list[list[object]] = []
    for key, value in run.items():
        if key == "schema":
            continue
        if isinstance(value, dict) and value and not before:
            rows.extend(description_rows(value, f"{key}."))
        elif key == "arguments" and isinstance(value, list) and value:
            rows.append([key, " ".join(str(word) for word in value)])
        elif value is not None and value != [] and value != {}:
            rows.append([f"{before}{key}", value if isinstance(value, (str, int, float, bool, list)) else str(value)])
    return rows


def stamp() -> str:
    """When a page was made, to the minute."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime())
