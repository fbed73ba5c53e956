"""The tables of a run that left `facts.json` and no telemetry: its series become scalars, its looks become layers.

Everything is read defensively: a fact that is missing leaves its column empty.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from surefoot.record.messages import Event
from surefoot.report.page.source import RunFolder, read_json

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import pyarrow as pa

_SCALARS = ("loss", "grad_norm", "clip_factor", "lr", "loss_scale", "nonfinite")
_LAYERS = ("grad_norm", "grad_largest", "nonfinite", "param_norm", "update_ratio", "dead_share")
_UNREMARKABLE = {"saved", "file-loaded", "model-loaded", "optimizer-loaded", "scheduler-loaded"}


def from_facts(folder: Path, ranks: tuple[dict[str, Any], ...]) -> RunFolder:
    """The source of a page, from `facts.json`, `run.json` and `findings.json`."""
    import pyarrow as pa

    empty = pa.table({})
    events, scalars, layers, problems = _tables(read_json(folder / "facts.json") or {})
    return RunFolder(
        folder=folder,
        run=read_json(folder / "run.json") or {},
        events=events,
        findings=read_json(folder / "findings.json"),
        scalars=scalars,
        layers=layers,
        histograms=empty,
        device=empty,
        problems=problems,
        ranks=ranks,
    )


def _tables(facts: dict[str, Any]) -> tuple[list[Event], pa.Table, pa.Table, list[str]]:
    try:
        return list(_events(facts)), _scalars(facts), _layers(facts), []
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        problem = f"facts.json is not as `surefoot run` writes it: {type(error).__name__}: {error}"
        return [], _scalars({}), _layers({}), [problem]


def _number(value: Any) -> float | None:
    """JSON has no NaN: the words that stand for it become numbers again."""
    if isinstance(value, bool) or value is None:
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _part_names(facts: dict[str, Any]) -> dict[int, str]:
    """What each optimizer is called: the model it trains if that tells them apart, otherwise its type and number."""
    stepped = [held for held in facts.get("optimizers", []) if held.get("steps")]
    if len(stepped) < 2:
        return {held["number"]: "" for held in stepped}
    roots: dict[int, str] = {}
    for held in stepped:
        owned = {
            str(p.get("label", "")).split(".")[0]
            for p in facts.get("parameters", [])
            if held["number"] in p.get("optimizers", [])
        }
        roots[held["number"]] = owned.pop() if len(owned) == 1 else ""
    if all(roots.values()) and len(set(roots.values())) == len(roots):
        return roots
    return {held["number"]: f"{held.get('type', 'optimizer')} {held['number'] + 1}" for held in stepped}


def _series(facts: dict[str, Any]) -> Iterator[tuple[str, dict[str, list[Any]]]]:
    names = _part_names(facts)
    for held in facts.get("optimizers", []):
        if held.get("number") in names:
            series = dict(held.get("series", {}))
            if len(names) > 1 and "at" in series:  # steps of the run, which all parts share
                series["step"] = series["at"]
            yield names[held["number"]], series
    if not names:
        yield "", facts.get("backward_series", {})


def _scalars(facts: dict[str, Any]) -> pa.Table:
    import pyarrow as pa

    columns: dict[str, list[Any]] = {name: [] for name in ("step", "part", *_SCALARS)}
    for part, series in _series(facts):
        steps = series.get("step", [])
        columns["step"].extend(int(step) for step in steps)
        columns["part"].extend([part] * len(steps))
        for name in _SCALARS:
            values = series.get(name, [])
            columns[name].extend(_number(values[i]) if i < len(values) else None for i in range(len(steps)))
    types = {"step": pa.int64(), "part": pa.string()}
    table = pa.table({name: pa.array(values, types.get(name, pa.float64())) for name, values in columns.items()})
    return table.sort_by("step")


def _layer_rows(facts: dict[str, Any]) -> Iterator[dict[str, Any]]:
    labels = {p.get("id"): str(p.get("label", p.get("id"))) for p in facts.get("parameters", [])}
    for look in facts.get("looks", []):
        for step in look.get("steps", []):
            for row in step.get("rows", []):
                yield {
                    "step": look["step"],
                    "layer": labels.get(row.get("id"), "?"),
                    "grad_norm": _number(row.get("grad")),
                    "grad_largest": _number(row.get("largest")),
                    "nonfinite": _number(row.get("nonfinite")),
                    "param_norm": _number(row.get("weight")),
                    "update_ratio": _number(row.get("ratio")),
                }
        for note in look.get("notes", {}).get("activations", []):
            if note.get("units") and note.get("dead") is not None:
                yield {"step": look["step"], "layer": str(note["module"]), "dead_share": note["dead"] / note["units"]}


def _layers(facts: dict[str, Any]) -> pa.Table:
    import pyarrow as pa

    rows = list(_layer_rows(facts))
    columns = {name: pa.array([row.get(name) for row in rows], pa.float32()) for name in _LAYERS}
    steps = pa.array([int(row["step"]) for row in rows], pa.int64())
    layers = pa.array([row["layer"] for row in rows], pa.string())
    return pa.table({"step": steps, "part": pa.array([""] * len(rows), pa.string()), "layer": layers, **columns})


def _events(facts: dict[str, Any]) -> Iterator[Event]:
    for note in facts.get("events", []):
        kind, step = str(note.get("event")), note.get("step")
        if kind == "spike":
            value, level = _number(note.get("value")), _number(note.get("level"))
            words = "The loss jumped" + (f" to {value:.3g}, from about {level:.3g}." if value and level else ".")
            yield Event("spike", step, words, 0.0, "warning", "spike")
        elif kind == "skip":
            yield Event("skip", step, "A step was left out.", 0.0, "warning", "nonfinite", "skip")
        elif kind.startswith("nonfinite-"):
            what = kind.removeprefix("nonfinite-")
            words = f"The {what} is not finite" + (f": {note['value']}." if note.get("value") else ".")
            yield Event("alarm", step, words, 0.0, "error", "nonfinite")
        elif kind not in _UNREMARKABLE:
            yield Event("alarm", step, kind.replace("-", " "), 0.0, "info")
