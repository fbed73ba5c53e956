"""Lines for a terminal: never too wide, never something that the terminal would obey."""

import math
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_streams import events, rows
from rich.cells import cell_len

from surefoot.record.messages import Batch, Event, StepRow
from surefoot.report.run_view import RunView
from surefoot.report.terminal.formatting import duration, number
from surefoot.report.terminal.lines import can_show_blocks, view_lines
from surefoot.report.terminal.plain import PlainLines


def a_run(parts=("",), steps=300, total_steps=1000):
    view = RunView(total_steps=total_steps)
    for step in range(1, steps + 1):
        view.add(Batch(steps=[
            StepRow(step, 1000 + 0.1 * step, part, 3 / step, 1.25, 0.5 if step % 5 == 0 else 1.0, 3e-4)
            for part in parts
        ]))  # fmt: skip
    summary = (
        "the gradient of blocks.11.attention.output.weight has 17 NaN entries; the step was left out, as were others"
    )
    view.add(Batch(events=[Event("skip", steps, summary, 1030.0, "warning")]))
    return view


def shown(view, width, **more):
    return [line.plain for line in view_lines(view, 1031.2, width, **more)]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_it_says_all_that_matters_at_the_usual_widths(width):
    lines = shown(a_run(), width)
    text = "\n".join(lines)
    for words in ("steps 301 / 1,000", "30%", "10 steps/s", "31s elapsed", "1:09 left", "loss 0.01", "smoothed 0.0105"):
        assert words in text
    for words in ("grad 1.25", "lr 0.0003", "clipped 20%", "skips 1", "alarms 1", "step 300 skip"):
        assert words in text
    assert lines[-1].endswith("…")
    assert len(lines) <= 5


@pytest.mark.parametrize("width", [60, 80, 120])
def test_each_part_has_a_line_with_its_curve(width):
    lines = shown(a_run(("generator", "discriminator")), width)
    own = [line for line in lines if line.startswith(("generator ", "discriminator "))]
    assert len(own) == 2
    assert all("█" in line and "▁" in line for line in own)


def test_a_loss_that_is_not_finite_is_said_and_marked():
    view = a_run()
    view.add(Batch(steps=[StepRow(301, 1030.1, "", math.nan, math.inf)]))
    text = "\n".join(shown(view, 80))
    assert "loss nan" in text
    assert "×" in text
    assert "grad inf" in text


def test_ascii_is_enough_where_the_stream_has_nothing_else():
    assert not can_show_blocks("ascii")
    assert not can_show_blocks("latin-1")
    assert not can_show_blocks(None)
    assert can_show_blocks("utf-8")
    assert all(line.isascii() for line in shown(a_run(("", "色彩")), 80, ascii_only=True))


@given(st.lists(rows, max_size=12), st.lists(events, max_size=6), st.integers(1, 200), st.booleans())
def test_no_line_is_wider_than_asked_for_and_none_is_obeyed(steps, happenings, width, ascii_only):
    view = RunView()
    view.add(Batch(steps=steps, events=happenings))
    lines = shown(view, width, events=6, ascii_only=ascii_only)
    assert all(cell_len(line) <= width for line in lines)
    assert not {unicodedata.category(letter) for line in lines for letter in line} & {"Cc", "Cf", "Zl", "Zp"}
    assert all(line.isascii() for line in lines) or not ascii_only


@pytest.mark.parametrize(
    ("value", "words"),
    [(None, "–"), (0.0, "0"), (2.3141, "2.314"), (65536.0, "65536"), (1.2e-5, "1.20e-5"), (123456.7, "1.23e5"),
     (1e20, "1.00e20"), (-0.5, "-0.5"), (math.nan, "nan"), (-math.inf, "-inf"), (9999.6, "10000"),
     (0.00123, "0.00123")],
)  # fmt: skip
def test_numbers_have_sensible_digits(value, words):
    assert number(value) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(4.9, "4s"), (187, "3:07"), (3753, "1:02:33"), (200_000, "2d 7h"), (math.inf, "–"), (1e300, "ages"), (None, "–")],
)
def test_durations_are_short(seconds, words):
    assert duration(seconds) == words


# ---- plain lines ----------------------------------------------------------------------------------------------------


def plain_output(total, steps_per_second, event_every=None, per_batch=1000):
    """Everything that is printed in a run, fed as the sink is, and in its last minute."""
    view, plain, lines = RunView(), PlainLines(), []
    for start in range(0, total, per_batch):
        now = 1e9 + start / steps_per_second
        steps = [StepRow(step, 1e9 + step / steps_per_second, "", 1.0) for step in range(start, start + per_batch, 50)]
        happened = [
            Event("skip", step, "a NaN", now)
            for step in range(start, start + per_batch)
            if event_every and step % event_every == 0
        ]
        view.add(Batch(steps=steps, events=happened))
        lines += plain.lines(view, happened, now)
    return lines + plain.last_line(view, now)


def test_a_million_steps_are_a_few_hundred_lines():
    assert len(plain_output(1_000_000, steps_per_second=1000)) < 200
    month = plain_output(1_000_000, steps_per_second=0.4, per_batch=50_000)
    assert len(month) < 100  # rows come too seldom here to say more


def test_a_storm_of_skips_does_not_fill_the_disk():
    lines = plain_output(1_000_000, steps_per_second=1000, event_every=20)
    assert len(lines) < 400
    assert "more events not listed" in lines[-1] or "more events not listed" in lines[-2]


def test_every_line_has_its_time_and_step():
    for line in plain_output(100_000, steps_per_second=100, event_every=50_000):
        name, date, time_of_day, step, *_ = line.split()
        assert (name, len(date), len(time_of_day), step) == ("surefoot", 10, 8, "step")


def test_events_are_reported_at_once_and_progress_now_and_then():
    view, plain = RunView(), PlainLines(every_seconds=10)
    view.add(Batch(steps=[StepRow(1, 1e9, loss=2.0)]))
    assert len(plain.lines(view, [], 1e9)) == 1
    view.add(Batch(steps=[StepRow(2, 1e9 + 1, loss=2.0)]))
    assert plain.lines(view, [], 1e9 + 1) == []
    (line,) = plain.lines(view, [Event("alarm", 2, "a\nspike\x1b[2J", 1e9 + 1, "error")], 1e9 + 1)
    assert line.endswith("step 2 · error · alarm · a spike [2J")
    assert len(plain.lines(view, [], 1e9 + 11)) == 1


def test_a_stall_is_reported_and_then_more_and_more_seldom():
    view, plain = RunView(), PlainLines()
    view.add(Batch(steps=[StepRow(7, 1e9, loss=2.0)]))
    told = [line for second in range(7200) for line in plain.lines(view, [], 1e9 + second)]
    assert "no new step for 2:01, the last was step 7" in told[1]
    assert len(told) < 10
