"""The page of an incident for people, short enough to paste into an issue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

from surefoot.core.device import runtime_version
from surefoot.core.wording import capital

if TYPE_CHECKING:
    from surefoot.record.incidents.contents import Print
    from surefoot.record.incidents.environment import Hardware, ScriptFacts, Switches, Versions

_STEPS_SHOWN = 10
_NAMES_SHOWN = 8
_SETTINGS_SHOWN = ("models", "optimizer", "lr", "scheduler", "precision", "loss_scale", "accumulate", "clip")


SignalRow: TypeAlias = Mapping[str, float | int | bool | str | None]
"""The signals of one step, by name."""


class IncidentPrints(TypedDict):
    """The fingerprints of a step, which a replay must reproduce."""

    loss: float | None
    losses: list[list[Print]]
    inputs: list[list[list[Print]]]
    gradients: dict[str, Print]


class IncidentFacts(TypedDict, total=False):
    """The content of `incident.json`."""

    schema: int
    step: int
    part: str
    kind: str
    summary: str
    action: str
    exact: bool
    inexact: list[str]
    """Why a replay may differ from the step."""
    applied_since: int
    """The number of steps that were applied before the host detected this one."""
    rank: int
    world_size: int
    signals: Sequence[SignalRow]
    configuration: dict[str, Any]
    """The settings of the run, by name."""
    versions: Versions
    hardware: Hardware
    switches: Switches
    script: ScriptFacts
    fingerprints: IncidentPrints
    parts: list[str]
    left_out: list[str]


def summary_of(facts: IncidentFacts) -> str:
    """Markdown from the content of `incident.json`."""
    lines = [
        f"# Step {facts['step']}: {facts['kind']}",
        "",
        f"{_sentence(facts['summary'])} What was done: {_done(facts)}.",
        "",
        *_replay(facts),
        "",
        *_signals(facts["signals"]),
        "",
        *_gradients(facts["fingerprints"]["gradients"]),
        *_with(facts),
    ]
    if facts["left_out"]:
        lines += ["", "Left out:", "", *(f"- {what}" for what in facts["left_out"])]
    return "\n".join(lines) + "\n"


def _done(facts: IncidentFacts) -> str:
    if facts["action"] == "skip":
        by = " by `--guard`" if facts["configuration"].get("guard") is True else ""
        return f"the step was left out{by}"
    return "nothing" if facts["action"] == "none" else str(facts["action"])


def _sentence(text: str) -> str:
    text = capital(text)
    return text if text.endswith(".") else f"{text}."


def _replay(facts: IncidentFacts) -> list[str]:
    if facts["exact"]:
        return ["`surefoot replay` on this folder runs the step again from the state before it."]
    return [
        "`surefoot replay` on this folder runs the step again as far as it is known, and reports whether it comes "
        "out the same bit for bit. Not exact:",
        "",
        *(f"- {reason}" for reason in facts["inexact"]),
    ]


def _signals(rows: Sequence[SignalRow]) -> list[str]:
    shown = rows[-_STEPS_SHOWN:]
    if not shown:
        return []
    names = [name for name in ("step", "loss", "grad_norm", "lr", "scale", "skipped") if name in shown[0]]
    lines = [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
    return lines + [f"| {' | '.join(_number(row.get(name)) for name in names)} |" for row in shown]


def _number(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else ""
    return f"{value:.6g}" if isinstance(value, float) else "" if value is None else str(value)


def _gradients(prints: Mapping[str, Print]) -> list[str]:
    bad = {name: each["nonfinite"] for name, each in prints.items() if each.get("nonfinite")}
    if not bad:
        return []
    shown = [f"- `{name}`: {count:,} values that are not finite" for name, count in list(bad.items())[:_NAMES_SHOWN]]
    more = [f"- and {len(bad) - _NAMES_SHOWN} more"] if len(bad) > _NAMES_SHOWN else []
    return [f"Gradients of {len(bad)} of {len(prints)} parameters:", "", *shown, *more, ""]


def _with(facts: IncidentFacts) -> list[str]:
    versions, hardware, settings = facts["versions"], facts["hardware"], facts["configuration"]
    runtime = runtime_version(hardware["device"], versions)
    lines = [
        f"- torch {versions['torch']}, Python {versions['python']}, surefoot {versions['surefoot']}"
        + (f", {runtime}" if runtime else ""),
        f"- {hardware['device']} ({hardware['name']}), {facts['switches']['threads']} threads",
    ]
    script = facts["script"]
    started = script["path"] or (f"-m {script['module']}" if script["module"] else None)
    if started:
        lines.append(f"- `{' '.join([started, *script['arguments']])}`")
    shown = {name: settings.get(name) for name in _SETTINGS_SHOWN}
    return lines + [f"- {name}: `{_setting(value)}`" for name, value in shown.items() if value not in (None, "None")]


def _setting(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
