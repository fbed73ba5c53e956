"""The header of the page: how the run ended, what is wrong, and what was done about it.

Findings come first. A run without a diagnosis is summarised by its events: skipped steps, rollbacks, alarms.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from surefoot.record.arrays import from_numpy
from surefoot.report.page.columns import by_part, measured, smoothed, whole_numbers
from surefoot.report.page.diagnosis import findings_of, reason_of, serious, steps_of, verdict_of
from surefoot.report.page.encode import number
from surefoot.report.run_view import is_alarm

if TYPE_CHECKING:
    import pyarrow as pa

    from surefoot.record.messages import Event
    from surefoot.report.page.sections import EventCard, FindingCard, Head, KeptStep, Tile
    from surefoot.report.page.source import RunFolder

_CARD_TITLES = {
    "skip": ("step was skipped", "steps were skipped"),
    "overflow": ("step overflowed and was skipped", "steps overflowed and were skipped"),
    "rollback": ("rollback", "rollbacks"),
    "spike": ("loss spike", "loss spikes"),
    "alarm": ("alarm", "alarms"),
    "clip-burst": ("burst of clipping", "bursts of clipping"),
    "halt": ("halt", "halts"),
    "lr-change": ("change of the learning rate", "changes of the learning rate"),
}
_CARD_KINDS = ("halt", "rollback", "skip", "overflow", "spike", "alarm", "clip-burst")
"""Kinds that are shown as cards, the most serious first."""
_SHORT_FACT, _LONGEST_FACT = 110, 200
"""Lengths of a headline in characters. A longer sentence than the first ends before its explanation, if it has one.
If it is still longer than the second, the title of its cause is the headline."""
_EXPLAINED = re.compile(r"[:;] |, (?:and the|which) ")
"""Where an explanation or a second fact begins. What follows a "but" is the fact itself."""
_MOST_PARTS = 3
"""With more parts than this, the header does not list the losses."""
_COUNTED = {
    "skip": "steps skipped",
    "overflow": "overflows",
    "rollback": "rollbacks",
    "checkpoint": "checkpoints",
}
"""Kinds of events whose number is shown at the top."""


def head(source: RunFolder) -> Head:
    """Verdict, headline and counts."""
    serious_findings, verdict = serious(findings_of(source.findings)), verdict_of(source.findings)
    last = _last_step(source)
    steps = steps_of(source.findings) or (last + 1 if last is not None else 0)
    return {
        "verdict": verdict,
        "tone": verdict or _tone(source),
        "headline": _headline(verdict, serious_findings, source),
        "lead": _advice(serious_findings[0]) if serious_findings else _loss_summary(source, verdict),
        "script": str(source.run.get("script") or source.folder.resolve().name),
        "arguments": _arguments(source.run.get("arguments")),
        "folder": source.folder.name,
        "steps": steps,
        "state": state(source),
        "tiles": _tiles(source, steps),
        "incident": _kept_step(source),
        "dropped": source.dropped,
        "problems": [str(problem) for problem in source.problems],
        "ranks": list(source.ranks),
    }


def _tone(source: RunFolder) -> str:
    """The colour of a run that was not diagnosed: that of its most serious event."""
    if state(source) == "failed":
        return "broken"
    alarmed = any(card["severity"] != "info" for card in event_cards(source.events))
    return "unstable" if alarmed else "none"


def state(source: RunFolder) -> str:
    """`waiting`, `running`, `finished` or `failed`, as far as the folder shows."""
    code = source.run.get("exit_code")
    if code is not None:
        return "finished" if code == 0 else "failed"
    tables = (source.scalars, source.layers, source.histograms, source.device)
    if not (source.run or source.events or any(table.num_rows for table in tables)):
        return "waiting"
    return "finished" if source.events and source.events[-1].event in ("end", "halt") else "running"


def _arguments(value: object) -> list[str]:
    return [str(word) for word in value] if isinstance(value, list) else []


def _headline(verdict: str, serious_findings: list[FindingCard], source: RunFolder) -> str:
    if serious_findings:
        return _fact(serious_findings[0], source)
    if verdict:
        return {"healthy": "no problem found", "unknown": "the run could not be judged"}.get(verdict, "")
    if state(source) == "waiting":
        return "no run recorded yet"
    titles = [card["title"] for card in event_cards(source.events) if card["severity"] != "info"]
    return ", ".join(titles[:2]) if titles else "no alarms"


def _fact(finding: FindingCard, source: RunFolder) -> str:
    """The first sentence of a finding, and the step from which the loss is not finite."""
    sentence = re.split(r"(?<=[^.])\.\s+(?=[A-Z`\d])", finding["summary"], maxsplit=1)[0].rstrip(".")
    if len(sentence) > _SHORT_FACT:  # without remarks in parentheses, and cut before the explanation
        sentence = re.sub(r" \([^()]*\)", "", sentence)
    if len(sentence) > _SHORT_FACT:
        ends = [found.start() for found in _EXPLAINED.finditer(sentence) if found.start() <= _LONGEST_FACT]
        short = [end for end in ends if end <= _SHORT_FACT]
        sentence = sentence[: (short or ends)[-1]] if ends else sentence if len(sentence) <= _LONGEST_FACT else ""
    sentence = sentence or finding["title"]
    step = _first_nonfinite(source)
    if step is None or re.search(r"NaN|\bnan\b|Inf\b|finite", sentence):
        return sentence
    return f"{sentence}; the loss is not finite from step {step:,}"


def _first_nonfinite(source: RunFolder) -> int | None:
    """The first step whose loss is NaN or Inf."""
    column = measured(source.scalars, "loss") if source.scalars.num_rows else None
    if column is None:
        return None
    steps = whole_numbers(source.scalars, "step")
    found = steps[column[1] & ~np.isfinite(column[0])]
    return int(found.min()) if len(found) else None


def _advice(finding: FindingCard) -> str:
    """The first fix; the card below has the evidence."""
    fixes = finding["fixes"]
    return f"First fix: {fixes[0]}" if fixes else str(finding["summary"])


def _loss_summary(source: RunFolder, verdict: str) -> str:
    """A summary of a run without a serious finding: how its loss changed."""
    parts, reason = list(by_part(source.scalars)), reason_of(source.findings)
    sentences = []
    if len(parts) <= _MOST_PARTS and " the loss went from " not in reason:
        sentences = [
            sentence
            for part, rows in parts
            if (
                sentence := _loss_change(
                    source.scalars.take(from_numpy(rows)), part or ("main" if len(parts) > 1 else "")
                )
            )
        ]
    if verdict == "healthy":
        sentences.append("If the result is still poor: `surefoot explain healthy`.")
    return " ".join(filter(None, (reason, *sentences)))


def _loss_change(table: pa.Table, part: str) -> str:
    column = measured(table, "loss")
    if column is None:
        return ""
    values = column[0][column[1]]
    finite = values[np.isfinite(values)]
    if len(finite) < 2:
        return ""
    _, line = smoothed(np.arange(len(finite)), finite)
    ends = (line[0], line[-1]) if len(line) else (finite[0], finite[-1])
    who = f"The loss of {part}" if part else "The loss"
    first, last = (f"{end:.3g}" for end in ends)
    if first == last:
        return f"{who} began and ended at {first}."
    return f"{who} {'fell' if ends[1] < ends[0] else 'rose'} from {first} to {last}."


def _last_step(source: RunFolder) -> int | None:
    if source.scalars.num_rows:
        return int(whole_numbers(source.scalars, "step").max())
    steps = [event.step for event in source.events if event.step is not None]
    return max(steps) if steps else None


def _seconds(source: RunFolder) -> float | None:
    given = source.run.get("seconds")
    if isinstance(given, (int, float)):
        with suppress(OverflowError):  # not written by surefoot: too large for a float
            return float(given)
    return _span(source)


def _span(source: RunFolder) -> float | None:
    """Seconds from the first logged step to the last."""
    times = measured(source.scalars, "time") if source.scalars.num_rows else None
    if times is None:
        return None
    known = times[0][times[1]]
    return float(known.max() - known.min()) if len(known) else None


def _tiles(source: RunFolder, steps: int) -> list[Tile]:
    """The main numbers of the run: losses, the first bad step, speed, counts of events, how it ended and where."""
    return [*_loss_tiles(source), *_time_tiles(source, steps), *_event_tiles(source), *_end_tiles(source)]


def _loss_tiles(source: RunFolder) -> list[Tile]:
    """The last and the lowest loss, for a run with one optimizer, and the first step whose loss is not finite."""
    column = measured(source.scalars, "loss") if source.scalars.num_rows else None
    if column is None or len(list(by_part(source.scalars))) != 1:
        return []
    steps, values = whole_numbers(source.scalars, "step")[column[1]], column[0][column[1]]
    last, finite = float(values[-1]), np.isfinite(values)
    found: list[Tile] = [{"name": "last loss", "value": number(last), "bad": not np.isfinite(last)}]
    if finite.any():
        place = int(np.flatnonzero(finite)[values[finite].argmin()])
        found.append({"name": "lowest loss", "value": number(float(values[place])), "step": int(steps[place])})
    if not finite.all():
        first = int(steps[~finite][0])
        found.append({"name": "first NaN or Inf", "value": f"step {first:,}", "step": first, "bad": True})
    return found


def _time_tiles(source: RunFolder, steps: int) -> list[Tile]:
    """Number of steps, duration and speed."""
    found: list[Tile] = [{"name": "steps", "value": steps, "unit": "count"}]
    seconds = _seconds(source)
    if seconds is not None:
        found.append({"name": "duration", "value": seconds, "unit": "seconds"})
    training = _span(source)
    if training and steps > 1:
        found.append({"name": "steps per second", "value": (steps - 1) / training})
    return found


def _end_tiles(source: RunFolder) -> list[Tile]:
    """How the run ended, and its device."""
    found: list[Tile] = []
    code, error = source.run.get("exit_code"), str(source.run.get("error") or "")
    if code is not None:
        found.append({"name": "exit status", "value": error or str(code), "bad": code != 0})
    devices = {str(name) for name in source.device.column("source").to_pylist()} if source.device.num_rows else set()
    accelerators = sorted(devices - {"host"})
    if devices or accelerators:
        shown = accelerators[0] if len(accelerators) == 1 else f"{len(accelerators)} devices"
        found.append({"name": "device", "value": shown if accelerators else "CPU"})
    return found


def _kept_step(source: RunFolder) -> KeptStep | None:
    """The first captured step, and the command that runs it again."""
    for event in source.events:
        command = event.evidence.get("replay")
        if isinstance(command, str) and command:
            return {"step": event.step, "command": command}
    return None


def _event_tiles(source: RunFolder) -> list[Tile]:
    """Counts of events, without those that did not occur."""
    by_kind: Counter[str] = Counter()
    for (kind, _), count in tally(source.events).items():
        by_kind[kind] += count
    found: list[Tile] = [
        {"name": name, "value": by_kind[kind], "unit": "count"} for kind, name in _COUNTED.items() if by_kind[kind]
    ]
    if alarms := tally([event for event in source.events if is_alarm(event)]).total():
        found.append({"name": "alarms", "value": alarms, "unit": "count"})
    factors = measured(source.scalars, "clip_factor") if source.scalars.num_rows else None
    if factors is not None and (factors[0][factors[1]] < 1).any():
        share = float((factors[0][factors[1]] < 1).mean())
        found.append({"name": "steps clipped", "value": share, "unit": "share"})
    return found


def tally(events: Sequence[Event]) -> Counter[tuple[str, str]]:
    """Counts of events by kind and cause. If there are very many, only some are logged, with a count."""
    seen: Counter[tuple[str, str]] = Counter()
    counted: dict[tuple[str, str], int] = {}
    for event in events:
        kind = (str(event.evidence.get("of", event.event)) if event.event == "drops" else event.event, event.cause)
        seen[kind] += event.event != "drops"
        count = event.evidence.get("count")
        if isinstance(count, int):
            counted[kind] = max(counted.get(kind, 0), count)
    return Counter({kind: max(seen[kind], counted.get(kind, 0)) for kind in {*seen, *counted}})


def event_cards(events: Sequence[Event]) -> list[EventCard]:
    """One card per serious kind of event, with its steps and the summary of the first."""
    found: list[EventCard] = []
    counts = tally(events)
    for kind in _CARD_KINDS:
        mine = [event for event in events if event.event == kind]
        if not mine:
            continue
        count = sum(number for (name, _), number in counts.items() if name == kind)
        causes = Counter({cause: n for (name, cause), n in counts.items() if name == kind and cause}).most_common(3)
        worst = "error" if any(event.severity == "error" for event in mine) else "warning"
        found.append(
            {
                "kind": kind,
                "severity": worst if any(event.severity != "info" for event in mine) else "info",
                "title": f"{count:,} {_CARD_TITLES[kind][count != 1]}",
                "causes": [f"{cause} ({number:,}×)" if number > 1 else cause for cause, number in causes],
                "summary": mine[0].summary,
                "steps": [event.step for event in mine if event.step is not None][:12],
                "count": count,
            }
        )
    return found
