"""Several runs on one page: `surefoot report A B`.

The page has a table with one column per run (verdict, losses, speed, exit), the differences between their descriptions,
their findings, and every line chart with one curve per run over the same steps. Runs may differ in length and in what
they recorded. Layer maps and histograms are only on the page of a single run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.core.files import write_file
from surefoot.core.redaction import Redactor
from surefoot.errors import UsageError
from surefoot.report.page.charts import scalar_charts
from surefoot.report.page.diagnosis import findings_of
from surefoot.report.page.html import page
from surefoot.report.page.payload import description_rows, marked_steps, stamp
from surefoot.report.page.source import RunFolder, read_source
from surefoot.report.page.summary import head

if TYPE_CHECKING:
    from surefoot.report.page.sections import ComparedRun, Head, PageChart

_MOST_RUNS = 12
"""Curves of more runs cannot be distinguished in one chart."""
_MOST_WITH_STEPS = 3
"""With more runs than this, charts show the smoothed lines only."""
_TIMES = frozenset({"started", "seconds"})
"""Fields of a description that always differ between runs."""


def write_comparison(folders: Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Write the page that compares runs, `comparison.html` in the first folder or at `out`; returns its path."""
    if len(folders) > _MOST_RUNS:
        raise UsageError(f"a page compares at most {_MOST_RUNS} runs; got {len(folders)}.")
    path = Path(out) if out is not None else Path(folders[0]) / "comparison.html"
    text = page({"made": stamp(), **compared_sections([read_source(folder) for folder in folders])})
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, text)
    return path


def compared_sections(sources: Sequence[RunFolder]) -> dict[str, Any]:
    """All sections of the page."""
    names = run_names([source.folder for source in sources])
    redact = Redactor(identity=False)
    heads = [head(source) for source in sources]
    return {
        "head": redact.inside(_head(names, heads)),
        "runs": redact.inside([_run(*each) for each in zip(names, heads, sources, strict=True)]),
        "charts": merged_charts([scalar_charts(source.scalars, marked_steps(source)) for source in sources], names),
        "facts": redact.inside(differing([description_rows(source.run) for source in sources], names)),
        "findings": [],
        "experiments": None,
        "event_cards": [],
        "events": {"total": 0, "list": []},
        "maps": [],
        "histograms": None,
        "device": [],
    }


def run_names(folders: Sequence[Path]) -> list[str]:
    """A short name for each run: its folder, with as many parent folders as needed to distinguish it."""
    paths = [folder.resolve() for folder in folders]
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{path.name} ({place})" for place, path in enumerate(paths, 1)]


def _head(names: Sequence[str], heads: Sequence[Head]) -> Head:
    verdicts = [f"{name} ({each['verdict'] or 'not diagnosed'})" for name, each in zip(names, heads, strict=True)]
    return {
        **heads[0],
        "verdict": "compared",
        "tone": "none",
        "headline": " and ".join([", ".join(verdicts[:-1]), verdicts[-1]]),
        "lead": _best(names, heads),
        "script": ", ".join(names),
        "arguments": [],
        "folder": "comparison",
        "steps": max(each["steps"] for each in heads),
        "state": "finished",
        "tiles": [],
        "incident": None,
        "dropped": 0,
        "problems": [f"{name}: {words}" for name, each in zip(names, heads, strict=True) for words in each["problems"]],
        "ranks": [],
    }


def _best(names: Sequence[str], heads: Sequence[Head]) -> str:
    """Which run reached the lowest loss, if all of them have one."""
    lowest = [next((tile["value"] for tile in each["tiles"] if tile["name"] == "lowest loss"), None) for each in heads]
    known = [value for value in lowest if isinstance(value, (int, float))]
    if len(known) < len(heads):
        return ""
    order = sorted(range(len(known)), key=known.__getitem__)
    return "Lowest loss: " + ", ".join(f"{known[place]:.3g} in {names[place]}" for place in order) + "."


def _run(name: str, described: Head, source: RunFolder) -> ComparedRun:
    return {
        "name": name,
        "verdict": described["verdict"],
        "headline": described["headline"],
        "tiles": described["tiles"],
        "findings": findings_of(source.findings),
    }


def merged_charts(charts: Sequence[Sequence[PageChart]], names: Sequence[str]) -> list[PageChart]:
    """One chart per number that any of the runs recorded, with the curves of all runs."""
    merged: dict[str, PageChart] = {}
    flat: dict[str, list[object]] = {}
    for name, of_run in zip(names, charts, strict=True):
        for chart in of_run:
            target = merged.setdefault(chart["id"], {**chart, "series": []})
            target["log"] = target["log"] or chart["log"]
            flat.setdefault(chart["id"], []).append(chart.get("flat"))
            for series in chart["series"]:
                part = f"{name} {series['part']}" if series["part"] else name
                target["series"].append({**series, "part": part})
    for chart in merged.values():
        chart.pop("flat", None)
        values = flat[chart["id"]]
        if len(values) == len(names) and values[0] is not None and len(set(values)) == 1 and chart["id"] != "loss":
            chart["flat"] = values[0]  # type: ignore[typeddict-item]
        if len(names) > _MOST_WITH_STEPS:
            chart["series"] = _lines_only(chart)
    return list(merged.values())


def _lines_only(chart: PageChart) -> list[Any]:
    """The smoothed line of each series that has one; other series unchanged."""
    smoothed = {
        (series["part"], series["name"].removesuffix(", smoothed"))
        for series in chart["series"]
        if series["role"] == "smooth"
    }
    return [
        series
        for series in chart["series"]
        if series["role"] in ("smooth", "line")
        or (series["role"] == "raw" and (series["part"], series["name"]) not in smoothed)
    ]


def differing(descriptions: Sequence[list[list[object]]], names: Sequence[str]) -> list[list[object]]:
    """The fields in which the descriptions of the runs differ: a name, and a value for each run."""
    values = [{str(key): value for key, value in rows} for rows in descriptions]
    keys = Counter(key for each in values for key in each)
    return [
        [key, {name: each.get(key, "none") for name, each in zip(names, values, strict=True)}]
        for key in keys
        if key not in _TIMES and len({repr(each.get(key)) for each in values}) > 1
    ]
