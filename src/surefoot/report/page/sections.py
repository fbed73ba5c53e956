"""The data of the page, section by section, as written by Python and read by the page's scripts.

Each section is plain JSON, declared as a `TypedDict`, so that a misspelled key is a type error. Numbers in columns keep
six digits; non-finite values are strings (`"nan"`, `"inf"`), because JSON has no such numbers (see `encode`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, TypeAlias, TypedDict

if TYPE_CHECKING:
    from typing_extensions import NotRequired

Column: TypeAlias = "list[float | int | str]"
"""Numbers of the page; non-finite values are strings."""
Role: TypeAlias = Literal["raw", "smooth", "line", "clipped"]
"""How a series is drawn."""


class PageSeries(TypedDict):
    """One curve of a chart."""

    name: str
    part: str
    role: Role
    x: list[int]
    y: Column
    constant: NotRequired[bool]
    """Whether the value never changes. Used only while the chart is built."""


class PageChart(TypedDict):
    """A line chart over the steps."""

    id: str
    title: str
    unit: str
    caption: str
    log: bool
    series: list[PageSeries]
    flat: NotRequired[float | int | str]
    """The only value of a chart whose series never change, shown as text."""


class MapCells(TypedDict):
    """The cells of a layer map: codes between `low` and `high`, row by row, packed."""

    rows: list[str]
    columns: list[int]
    log: bool
    low: float
    high: float
    colours: list[float]
    cells: str


class LayerMap(MapCells):
    """One row per layer, one column per interval of steps."""

    id: str
    title: str
    caption: str


class HistogramColumns(TypedDict):
    """Histograms of one tensor over time: one column per recorded step, packed."""

    columns: list[int]
    bins: int
    cells: str
    odd: dict[str, list[int]] | None
    """How many values were NaN or Inf, by kind; `None` if all were finite."""


class LayerHistogram(HistogramColumns):
    """Histograms of one tensor, with the tensor they belong to."""

    kind: str
    layer: int
    """Index into the layers of the section."""


class HistogramSection(TypedDict):
    """All histograms of a run."""

    layers: list[str]
    edges: dict[str, list[float]]
    """Edges of the bins, by kind of tensor."""
    items: list[LayerHistogram]


class FindingCard(TypedDict):
    """A finding of the diagnosis, with the title that its cause has in the catalogue."""

    cause: str
    title: str
    severity: str
    confidence: float | None
    step: int | None
    where: list[str]
    evidence: Mapping[str, object]
    summary: str
    fixes: list[str]


class EventCard(TypedDict):
    """All events of one kind on one card."""

    kind: str
    severity: str
    title: str
    causes: list[str]
    summary: str
    steps: list[int]
    count: int


class EventRow(TypedDict):
    """One event of the list."""

    event: str
    step: int | None
    summary: str
    severity: str
    cause: NotRequired[str]
    action: NotRequired[str]
    part: NotRequired[str]
    time: NotRequired[float]
    evidence: NotRequired[Mapping[str, object]]


class EventSection(TypedDict):
    """The list of events; `total` includes those that are not listed."""

    total: int
    list: list[EventRow]


class Tile(TypedDict):
    """A number at the top of the page, with its name."""

    name: str
    value: float | int | str
    unit: NotRequired[Literal["count", "share", "seconds"]]
    """How the number is formatted; without it, with three digits."""
    step: NotRequired[int]
    """The step that the tile links to."""
    bad: NotRequired[bool]
    """Whether the value is shown as an error."""


class KeptStep(TypedDict):
    """The first captured step, and the command that runs it again."""

    step: int | None
    command: str


class RankRow(TypedDict):
    """One rank of a run of several."""

    name: str
    verdict: str
    summary: str


class Head(TypedDict):
    """The header of the page: verdict, headline and main numbers."""

    verdict: str
    tone: str
    headline: str
    lead: str
    script: str
    arguments: list[str]
    folder: str
    steps: int
    state: str
    tiles: list[Tile]
    incident: KeptStep | None
    dropped: int
    problems: list[str]
    ranks: list[RankRow]


class ComparedRun(TypedDict):
    """One run of a page that compares several."""

    name: str
    verdict: str
    headline: str
    tiles: list[Tile]
    findings: list[FindingCard]


class ExperimentRow(TypedDict):
    """One run of `surefoot bisect`."""

    title: str
    verdict: str
    why: str
    steps: int | None
    loss: float | None


class ExperimentSection(TypedDict):
    """What `surefoot bisect` tried."""

    sentence: str
    rows: list[ExperimentRow]
    chart: PageChart | None
