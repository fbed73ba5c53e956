"""The view of a run: right numbers from healthy rows, and nothing that any row could break."""

import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_streams import events, rows

from surefoot.record.messages import Batch, Event, StepRow
from surefoot.report.run_view import MOST_EVENTS, MOST_PARTS, Pace, PartView, RunView


def row(step, **numbers):
    return StepRow(step, numbers.pop("time", 1000.0 + 0.1 * step), **numbers)


def event(name, step=0, **more):
    return Event(name, step, more.pop("summary", name), more.pop("time", 1000.0 + 0.1 * step), **more)


def fed(steps=(), events=(), **settings):
    view = RunView(**settings)
    view.add(Batch(steps=steps, events=events))
    return view


def test_the_pace_is_by_the_rows_own_times_however_they_are_batched():
    at_once = fed([row(step) for step in range(200)])
    one_by_one = RunView()
    for step in range(200):
        one_by_one.add(Batch(steps=[row(step)]))
    assert at_once.steps_per_second == pytest.approx(10.0) == one_by_one.steps_per_second


def test_the_pace_forgets_a_pause_after_a_few_seconds():
    view = fed([row(step) for step in range(100)])
    view.add(Batch(steps=[row(step, time=1600.0 + 0.1 * step) for step in range(100, 130)]))
    assert view.steps_per_second == pytest.approx(10.0)


def test_slow_steps_have_a_pace():
    assert fed([row(step, time=60.0 * step) for step in range(5)]).steps_per_second == pytest.approx(1 / 60)


def test_a_thinned_log_has_the_pace_of_the_run():
    assert fed([row(step) for step in range(0, 1000, 10)]).steps_per_second == pytest.approx(10.0)


def test_the_remaining_time_follows_from_pace_and_plan():
    assert fed([row(step) for step in range(100)], total_steps=200).seconds_left == pytest.approx(10.0)
    planned = [event("start", evidence={"total_steps": 200})]
    assert fed([row(step) for step in range(100)], planned).seconds_left == pytest.approx(10.0)
    assert fed([row(1), row(2)]).seconds_left is None


def test_a_spike_and_a_nan_do_not_move_the_smoothed_loss():
    view = fed([row(step, loss=2.0) for step in range(50)] + [row(50, loss=1e20), row(51, loss=math.nan)])
    assert view.lead.smoothed == 2.0
    assert math.isnan(view.lead.loss)


def test_what_a_row_does_not_say_stays():
    view = fed([row(1, loss=1.0, lr=0.1, loss_scale=8.0), row(2)])
    assert (view.lead.loss, view.lead.lr, view.lead.loss_scale) == (1.0, 0.1, 8.0)


def test_skips_clips_rollbacks_and_alarms_are_counted():
    steps = [row(step, clip_factor=0.5 if step % 4 == 0 else 1.0, skipped=step == 3) for step in range(8)]
    alarms = [event("alarm", 5, severity="error"), event("spike", 6, severity="warning"), event("alarm", 7)]
    view = fed(steps, [event("skip", 3), event("rollback", 4), *alarms])
    assert view.tallies == {"skips": 1, "rollbacks": 1, "alarms": 2, "rows dropped": 0}
    assert view.clip_share == 0.25


def test_events_of_a_kind_in_a_row_are_one_with_a_count():
    view = fed(events=[event("skip", 1), event("skip", 2), event("alarm", 2), event("skip", 3)])
    assert [(item.event, item.step, item.times) for item in view.events.groups] == [
        ("skip", 2, 2), ("alarm", 2, 1), ("skip", 3, 1),
    ]  # fmt: skip


def test_findings_of_different_causes_stay_apart():
    view = fed(events=[event("finding", 1, cause="lr.too-high"), event("finding", 1, cause="clip.saturated")])
    assert len(view.events.groups) == 2


def test_a_resumed_run_is_running_again_and_counts_its_time_anew():
    view = fed([row(1)], [event("end", 1)])
    assert view.over
    view.add(Batch(steps=[row(1, time=5000.5)], events=[event("resume", 1, time=5000.0)]))
    assert view.state == "running"
    assert view.elapsed(5010.0) == 10.0


def test_rows_and_events_count_in_the_order_of_their_times():
    view = fed([row(1), row(100)], [event("end", 50)])
    assert view.state == "running"


def test_a_run_is_stalled_when_a_step_takes_far_longer_than_steps_do():
    quick = fed([row(step) for step in range(10)])
    assert not quick.is_stalled(1005.0)
    assert quick.is_stalled(1040.0)
    slow = fed([row(step, time=60.0 * step) for step in range(10)])
    assert not slow.is_stalled(9 * 60 + 100.0)
    assert slow.is_stalled(9 * 60 + 400.0)


def test_its_size_does_not_grow_with_the_run():
    def size_after(count):
        view = RunView()
        for start in range(0, count, 1000):
            steps = [row(step, part=f"part {step % 20}", loss=float(step)) for step in range(start, start + 1000)]
            view.add(Batch(steps=steps, events=[event("skip" if step % 2 else "alarm", step) for step in range(50)]))
        return len(pickle.dumps(view))

    assert size_after(40_000) < 1.2 * size_after(10_000)


@given(st.lists(st.lists(rows, max_size=8), max_size=6), st.lists(events, max_size=12))
def test_no_stream_breaks_it(batches, happenings):
    view = RunView()
    for batch in batches:
        view.add(Batch(steps=batch, events=happenings))
    assert len(view.parts) <= MOST_PARTS
    assert len(view.events.groups) <= MOST_EVENTS
    assert view.steps_per_second is None or view.steps_per_second >= 0
    assert view.seconds_left is None or view.seconds_left >= 0
    assert view.elapsed(1.5e9) is None or view.elapsed(1.5e9) >= 0


@given(st.lists(rows, max_size=20))
def test_after_any_stream_a_healthy_one_is_shown_as_it_is(strange):
    view = RunView()
    view.add(Batch(steps=strange))
    healthy = [row(2**63 + step, part="mine", time=1e12 + 0.1 * step, loss=2.0) for step in range(100)]
    view.add(Batch(steps=healthy))
    if "mine" in view.parts:
        assert view.parts["mine"].smoothed == 2.0
        assert view.parts["mine"].pace.steps_per_second == pytest.approx(10.0, rel=0.01)


def test_rows_that_are_read_after_the_end_do_not_bring_a_run_back_to_life():
    view = fed(events=[event("end", 9, time=100.0)])
    view.add_row(row(9, time=99.5))
    assert view.state == "ended"
    view.add_row(row(10, time=101.0))
    assert view.state == "running"


def test_the_pace_is_unknown_until_two_steps_at_different_times():
    pace = Pace()
    assert pace.steps_per_second is None
    pace.add(10.0, 0)
    pace.add(10.0, 1)
    assert pace.steps_per_second is None
    pace.add(12.0, 4)
    assert pace.steps_per_second == pytest.approx(2.0)


def test_a_step_that_goes_back_and_a_reset_start_the_pace_anew():
    pace = Pace()
    for step in range(10):
        pace.add(float(step), step)
    pace.add(11.0, 3)
    assert pace.steps_per_second is None
    pace.add(11.5, 4)
    pace.reset()
    assert pace.steps_per_second is None


def test_a_time_that_is_not_finite_is_ignored():
    pace = Pace()
    for step, time in enumerate((0.0, math.nan, math.inf, 1.0)):
        pace.add(time, step)
    assert pace.steps_per_second == pytest.approx(3.0)


def test_what_a_row_does_not_say_stays_as_it_was():
    part = PartView()
    part.add(StepRow(0, 0.0, loss=2.0, grad_norm=1.0, lr=0.1, loss_scale=1024.0))
    part.add(StepRow(1, 1.0))
    assert (part.step, part.loss, part.grad_norm, part.lr, part.loss_scale) == (1, 2.0, 1.0, 0.1, 1024.0)


def test_the_share_of_clipped_steps_counts_only_steps_that_could_be_clipped():
    part = PartView()
    assert part.clip_share is None
    for factor in (None, 1.0, 0.5, 0.1, 1.0):
        part.add(StepRow(0, 0.0, clip_factor=factor))
    assert part.clip_share == pytest.approx(0.5)


def test_a_nan_is_shown_and_not_smoothed():
    part = PartView()
    for step, loss in enumerate((1.0, 3.0, math.nan)):
        part.add(StepRow(step, float(step), loss=loss))
    assert math.isnan(part.loss)
    assert part.smoothed == pytest.approx(2.0)
