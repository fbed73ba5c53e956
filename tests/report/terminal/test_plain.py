"""Plain lines: seldom when all is well, at once for events, and never a flood."""

import itertools

from surefoot.record.messages import Batch, Event, StepRow
from surefoot.report.run_view import RunView
from surefoot.report.terminal.plain import EVENTS_A_MINUTE, PlainLines, summary

BEGAN = 1_700_000_040.0


def view_at(step, **settings):
    view = RunView(**settings)
    view.add(Batch(steps=[StepRow(i, BEGAN + i, loss=2.0, grad_norm=0.5, lr=1e-3) for i in range(step + 1)]))
    return view


def test_progress_is_printed_at_intervals_that_grow():
    plain, printed = PlainLines(every_seconds=10.0), []
    for second in range(3_600):
        printed += [second] * len(plain.lines(view_at(0) if second == 0 else _moved(second), [], BEGAN + second))
    gaps = [later - earlier for earlier, later in itertools.pairwise(printed)]
    assert printed[0] == 0
    assert gaps[0] == 10
    assert gaps == sorted(gaps)
    assert gaps[-1] >= 60


def _moved(step):
    view = RunView()
    view.add_row(StepRow(step, BEGAN + step, loss=1.0))
    return view


def test_events_are_printed_at_once_and_a_flood_is_counted():
    plain = PlainLines()
    flood = [Event("skip", step, "NaN", BEGAN, "warning") for step in range(50)]
    lines = plain.lines(view_at(3), flood, BEGAN)
    assert sum(" skip " in line for line in lines) == EVENTS_A_MINUTE
    assert lines[-1].endswith(f"{50 - EVENTS_A_MINUTE} more events not listed")


def test_a_stall_is_printed_with_growing_pauses():
    plain, view = PlainLines(), view_at(3)
    plain.lines(view, [], BEGAN + 3)
    stalls = [
        second for second in range(4, 2_000) if any("no new step" in x for x in plain.lines(view, [], BEGAN + second))
    ]
    assert 2 <= len(stalls) <= 6
    assert stalls[1] - stalls[0] >= 100


def test_the_last_line_is_left_out_if_nothing_is_new():
    plain, view = PlainLines(), view_at(3)
    plain.lines(view, [], BEGAN + 3)
    assert plain.last_line(view, BEGAN + 4) == []
    view.add(Batch(events=[Event("end", 3, "done", BEGAN + 5)]))
    (line,) = plain.last_line(view, BEGAN + 5)
    assert line.endswith("ended")


def test_the_summary_holds_what_is_known_and_nothing_else():
    text = summary(view_at(99, total_steps=200), BEGAN + 99)
    assert text.startswith("steps 100/200 · loss 2 grad 0.5 lr 0.001")
    assert "left" in text
    assert "clipped" not in text
    assert "skips" not in text


def test_ascii_lines_are_ascii():
    view = view_at(3)
    assert all(line.isascii() for line in PlainLines(ascii_only=True).lines(view, [], BEGAN))
