"""A run that stalls, becomes slower or writes no checkpoints is reported, and one that does something else is not."""

from __future__ import annotations

import random

import pytest

import surefoot as sf
from patience import HANG_SECONDS, Clock
from surefoot.errors import SettingError
from surefoot.record import progress_alarms
from surefoot.record.messages import CheckpointsExpected, Event, StepRow
from surefoot.record.progress_alarms import (
    LATE_SECONDS,
    LONGEST_TICK_SECONDS,
    NO_CHECKPOINT,
    SLOW,
    STALLED,
    ProgressAlarms,
    RunProgress,
)


class Run:
    """A run whose clock is set: steps, pauses, checkpoints; and all that was reported."""

    def __init__(self, monkeypatch, **settings):
        self.clock = Clock()
        monkeypatch.setattr(progress_alarms, "time", self.clock)
        self.progress = RunProgress(ProgressAlarms(**settings))
        self.found: list[Event] = []
        self.step = 0

    def takes(self, steps, seconds):
        """So many steps, each of so many seconds: a number, or a function of the step."""
        for _ in range(steps):
            self.waits(seconds(self.step) if callable(seconds) else seconds)
            self.found += self.progress.take([StepRow(self.step, self.clock.now)], [])
            self.step += 1

    def waits(self, seconds, drawing=False):
        """Time passes for the program and for the thread of the log."""
        while seconds > 0:
            tick = min(seconds, 1.0)
            self.clock.now += tick
            seconds -= tick
            self.progress.tick()
            if tick == 1.0:
                self.found += self.progress.take([], [], drew=drawing)

    def sleeps(self, seconds):
        """The whole process stands still."""
        self.clock.now += seconds

    def saves(self):
        event = Event("checkpoint", self.step, "saved", self.clock.now)
        self.found += self.progress.take([], [event])

    @property
    def causes(self):
        return [(event.cause, event.severity) for event in self.found]


@pytest.fixture
def run(monkeypatch):
    return Run(monkeypatch)


def test_a_run_that_makes_no_step_is_reported_again_after_twice_the_time_and_when_it_continues(run):
    run.takes(100, 0.5)
    run.waits(14 * 60)
    assert run.found == []
    run.waits(50 * 60)
    run.takes(1, 0.5)
    assert run.causes == [(STALLED, "warning")] * 3 + [(STALLED, "info")]
    assert run.found[0].step == 99
    assert "no step, no batch and no checkpoint for 15 min after step 99" in run.found[0].summary
    assert run.found[-1].evidence["seconds"] == pytest.approx(64 * 60, abs=2)


def test_a_run_that_has_not_begun_is_not_stalled(run):
    run.waits(3600)
    assert run.found == []


def test_an_evaluation_that_draws_batches_is_no_stall_and_a_silent_pause_is_learned(monkeypatch):
    run = Run(monkeypatch, stalled_minutes=5)
    run.takes(100, 0.5)
    run.waits(3600, drawing=True)
    run.takes(100, 0.5)
    run.waits(4 * 60)  # not reported, and from now on known
    run.takes(100, 0.5)
    run.waits(11 * 60)
    assert run.found == []
    run.waits(2 * 60)
    assert run.causes == [(STALLED, "warning")]


def test_a_laptop_that_sleeps_all_night_is_neither_stalled_nor_slow_nor_late(run):
    run.progress.expect("", CheckpointsExpected(every_minutes=30))
    for _ in range(12):
        run.takes(60, 1.0)
        run.sleeps(8 * 3600)
        run.saves()
    assert run.found == []
    assert run.progress.tick() < 12 * (60 + LONGEST_TICK_SECONDS) + 60


def test_steps_that_take_twice_as_long_are_reported_once_and_when_it_is_over(run):
    noise = random.Random(0)
    run.takes(2000, lambda _: noise.uniform(0.15, 0.25))
    run.takes(2000, lambda _: noise.uniform(0.3, 0.5))
    assert run.causes == [(SLOW, "warning")]
    assert run.found[0].evidence["times"] == pytest.approx(2.0, rel=0.1)
    assert run.found[0].step < 2500
    run.takes(2000, lambda _: noise.uniform(0.15, 0.25))
    assert run.causes == [(SLOW, "warning"), (SLOW, "info")]


def test_a_decline_that_no_two_stretches_show_is_reported(run):
    run.takes(20_000, lambda step: 0.1 * (1 + step / 20_000))
    assert run.causes == [(SLOW, "warning")]


@pytest.mark.parametrize(
    "seconds",
    [
        lambda step: 40.0 if step % 200 == 199 else 0.2,  # an evaluation, as long as the steps before it
        lambda step: 120.0 if step % 1500 == 1499 else 0.2,  # an epoch
        lambda step: 6.0 if step > 2000 and step % 100 == 0 else 0.2,  # checkpoints, from a certain step on
        lambda step: 30.0 if step < 20 else 0.2,  # it compiles at first
        lambda step: 0.0 if step % 100 else 20.0,  # the program waits for the device at every hundredth step
        lambda step: 0.2 * (1 + (step // 60) % 3),  # a pace that always varies
        lambda step: 0.4 if step < 1500 else 0.2,  # faster
    ],
)
def test_what_a_healthy_run_does_is_not_slow(run, seconds):
    run.takes(4000, seconds)
    assert run.found == []


@pytest.mark.parametrize("seed", range(3))
def test_a_shared_machine_with_a_noisy_pace_is_not_slow(run, seed):
    noise = random.Random(seed)
    run.takes(6000, lambda _: 0.1 * noise.lognormvariate(0.0, 1.0))
    assert run.found == []


def test_checkpoints_that_stop_are_reported_with_the_last_one_and_when_they_are_back(run):
    run.progress.expect("", CheckpointsExpected(every_steps=100))
    for _ in range(5):
        run.takes(100, 1.0)
        run.saves()
    run.takes(200, 1.0)
    assert run.found == []
    run.takes(int(LATE_SECONDS) + 5, 1.0)
    assert run.causes == [(NO_CHECKPOINT, "warning")]
    assert "one is due every 100 steps, and the last one is of step 500" in run.found[0].summary
    run.takes(3000, 1.0)
    assert run.causes == [(NO_CHECKPOINT, "warning")] * 3
    run.saves()
    assert run.causes[-1] == (NO_CHECKPOINT, "info")


def test_a_large_checkpoint_that_takes_longer_than_the_interval_is_not_late(run):
    run.progress.expect("", CheckpointsExpected(every_steps=10))
    for _ in range(6):
        run.takes(500, 1.0)  # one is written all the time
        run.saves()
    run.takes(900, 1.0)
    assert run.found == []


def test_a_checkpoint_that_is_due_during_a_long_evaluation_is_not_late(run):
    run.progress.expect("", CheckpointsExpected(every_minutes=10))
    for _ in range(3):
        run.takes(600, 1.0)
        run.saves()
    run.waits(3600, drawing=True)
    run.takes(3, 1.0)  # the first of them begins the save
    run.saves()
    run.takes(600, 1.0)
    assert run.found == []


def test_no_checkpoint_at_all_is_reported_too(run):
    run.progress.expect("", CheckpointsExpected(every_minutes=10))
    run.takes(40 * 60, 1.0)
    assert "there is none yet" in run.found[0].summary


def test_each_alarm_can_be_turned_off(monkeypatch):
    run = Run(monkeypatch, stalled_minutes=None, slower_times=None, late_times=None)
    run.progress.expect("", CheckpointsExpected(every_steps=10))
    run.takes(1000, 0.1)
    run.takes(2000, 1.0)
    run.waits(7200)
    assert run.found == []


@pytest.mark.parametrize("settings", [{"slower_times": 1.0}, {"stalled_minutes": 0}, {"late_times": 0.5}])
def test_a_limit_that_every_run_exceeds_is_refused(settings):
    with pytest.raises(SettingError, match="must be above"):
        ProgressAlarms(**settings)


def test_the_log_has_the_alarm(tmp_path):
    with sf.RunLog(tmp_path, device_seconds=None, progress=ProgressAlarms(stalled_minutes=1e-9)) as log:
        log.take(StepRow(3, 0.0, loss=1.0))
        assert log.flush(HANG_SECONDS)
        assert log.flush(HANG_SECONDS)
        assert log.flush(HANG_SECONDS)
    events = sf.load_run(tmp_path).events
    assert next((event.cause, event.step) for event in events if event.event == "alarm") == (STALLED, 3)
