"""A `RunView` as lines for a terminal: pure functions from a view, a width and the time to styled text.

The progress comes first, then one line for each optimizer with its loss curve, then the other numbers, then the last
events. Numbers wrap to another line in a narrow terminal; summaries are cut with `…`. No line is wider than requested.
If the stream does not support block characters, everything is ASCII.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, TypeAlias

from surefoot.core.sparkline import sparkline
from surefoot.report.terminal.formatting import as_ascii, clock, duration, number, one_line, pace, rate

if TYPE_CHECKING:
    from rich.text import Text

    from surefoot.report.run_view import EventGroup, PartView, RunView

Chip: TypeAlias = "tuple[str, str]"
"""Text and its style."""
Line: TypeAlias = "list[Chip]"

WIDEST = 140
_WIDEST_CURVE = 64
_NARROWEST_CURVE = 6
_LONGEST_NAME = 16
_SEVERITY = {"info": "", "warning": "yellow", "error": "bold red"}
_GAP = "  "


def can_show_blocks(encoding: str | None) -> bool:
    """Whether a stream with this encoding supports the characters of the curves."""
    try:
        "▁█×↑…·–─".encode(encoding or "ascii")
    except (UnicodeError, LookupError):
        return False
    return True


def view_lines(view: RunView, now: float, width: int, *, events: int = 1, ascii_only: bool = False) -> list[Text]:
    """The view as lines of at most `width` cells."""
    width = max(1, min(width, WIDEST))
    if view.started is None:
        return finished_lines([[("no steps logged yet", "dim")]], width, ascii_only)
    lines = [
        *_flowed(_progress(view, now), width),
        *_part_lines(view, width, ascii_only),
        *_flowed([*_numbers(view), *_counts(view)], width),
        *(_event(group) for group in view.events.latest(events)),
    ]
    return finished_lines(lines, width, ascii_only)


def rule(text: str, width: int, ascii_only: bool = False) -> list[Text]:
    """A horizontal line above surefoot's own lines."""
    stroke = "-" if ascii_only else "─"
    return finished_lines([[(f"{stroke * 2} {text} ".ljust(max(1, width), stroke), "dim")]], width, ascii_only)


def finished_lines(lines: Sequence[Line], width: int, ascii_only: bool) -> list[Text]:
    """Styled text that is not wider than `width`."""
    from rich.text import Text

    finished = []
    for line in lines:
        text = Text(no_wrap=True, end="")
        for words, style in line:
            text.append(words, style)
        text.truncate(width, overflow="ellipsis")
        if ascii_only:
            text.plain = as_ascii(text.plain)
        finished.append(text)
    return finished


def _progress(view: RunView, now: float) -> list[Line]:
    """Progress, speed and time."""
    step, total = view.step, view.total_steps
    chips: list[Line] = [[("step ", "dim"), ("–" if step is None else f"{step:,}", "bold cyan")]]
    if total and step is not None:  # steps are numbered from 0: after step 599, all 600 are done
        done = step + 1
        chips = [[("steps ", "dim"), (f"{done:,}", "bold cyan"), (f" / {total:,}", "dim")]]
        chips.append([(f"{min(100, 100 * done // total)}%", "")])
    if view.steps_per_second is not None:
        chips.append([(pace(view.steps_per_second), "")])
    chips.append([(duration(view.elapsed(now)), ""), (" elapsed", "dim")])
    if view.seconds_left is not None and not view.is_stalled(now):
        chips.append([(duration(view.seconds_left), ""), (" left", "dim")])
    if view.over:
        chips.append([(view.state, "bold red" if view.state == "halted" else "bold green")])
    elif view.is_stalled(now):
        chips.append([(f"no new step for {duration(view.quiet_for(now))}", "yellow")])
    return chips


def _part_lines(view: RunView, width: int, ascii_only: bool) -> list[Line]:
    several = len(view.parts) > 1
    column = min(_LONGEST_NAME, max((len(_name(name)) for name in view.parts), default=0)) if several else 0
    lines = [_part_line(name, part, width, column, ascii_only) for name, part in view.parts.items()]
    return [*lines, [("… and more parts", "dim")]] if view.parts_left_out else lines


def _part_line(name: str, part: PartView, width: int, column: int, ascii_only: bool) -> Line:
    head: Line = [(f"{_shortened(_name(name), column):<{column}} ", "bold")] if column else []
    healthy = part.loss is None or math.isfinite(part.loss)
    # Numbers vary in length: fixed columns keep the curve in place.
    head += [("loss ", "dim"), (f"{number(part.loss):<8}", "bold" if healthy else "bold red")]
    head += [(" smoothed ", "dim"), (f"{number(part.smoothed):<8}", "")]
    tail: Line = []
    for label, words in [("grad", number(part.grad_norm, 3)), ("lr", rate(part.lr))] if column else []:
        chip: Line = [(f"{_GAP}{label} ", "dim"), (f"{words:<8}", "")]
        if _length(head) + _length(tail) + _length(chip) + _NARROWEST_CURVE < width:
            tail += chip
    room = min(_WIDEST_CURVE, width - _length(head) - _length(tail) - 1)
    curve = sparkline(part.curve.slots(room), ascii_only) if room >= _NARROWEST_CURVE else ""
    return [*head, (" ", ""), *_coloured(curve), (" " * max(0, room - len(curve)) if tail else "", ""), *tail]


def _coloured(curve: str) -> Line:
    return [("".join(marks), "bold red" if bad else "green") for bad, marks in groupby(curve, "×x↑^".__contains__)]


def _numbers(view: RunView) -> list[Line]:
    """The numbers of the only part; if there are several parts, each has its own line."""
    part = view.lead
    if part is None:
        return []
    if len(view.parts) > 1:
        return [_labelled("loss scale", number(part.loss_scale))] if part.loss_scale not in (None, 1.0) else []
    broken = part.grad_norm is not None and not math.isfinite(part.grad_norm)
    chips = []
    if part.grad_norm is not None:
        chips.append(_labelled("grad", f"{number(part.grad_norm, 3):<7}", "bold red" if broken else ""))
    if part.lr is not None:
        chips.append(_labelled("lr", rate(part.lr)))
    if part.loss_scale not in (None, 1.0):  # 1 is no scaling
        chips.append(_labelled("loss scale", number(part.loss_scale)))
    return chips


def _counts(view: RunView) -> list[Line]:
    chips = [_labelled("clipped", f"{100 * view.clip_share:.0f}%")] if view.clip_share is not None else []
    return chips + [
        _labelled(name, f"{count:,}", "yellow" if count else "dim")
        for name, count in view.tallies.items()
        if count or name in ("skips", "alarms")
    ]


def _event(group: EventGroup) -> Line:
    style = _SEVERITY.get(group.severity, "")
    times = f" ×{group.times:,}" if group.times > 1 else ""
    part = f" {_shortened(_name(group.part), _LONGEST_NAME)}" if group.part else ""
    line: Line = [(clock(group.time), "dim")]
    if group.step is not None:
        line.append((f" step {group.step:,}", "dim"))
    return [*line, (f" {group.event}{times}{part}", style or "cyan"), (f" {group.summary}", style)]


def _labelled(label: str, text: str, style: str = "") -> Line:
    return [(f"{label} ", "dim"), (text, style)]


def _flowed(chips: Sequence[Line], width: int) -> list[Line]:
    """Chips next to each other, wrapped if there is no space."""
    lines: list[Line] = []
    for chip in chips:
        if lines and _length(lines[-1]) + len(_GAP) + _length(chip) <= width:
            lines[-1] += [(_GAP, ""), *chip]
        else:
            lines.append(list(chip))
    return lines


def _length(line: Line) -> int:
    from rich.cells import cell_len

    return sum(cell_len(words) for words, _ in line)


def _name(part: str) -> str:
    return one_line(part) or "main"


def _shortened(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
