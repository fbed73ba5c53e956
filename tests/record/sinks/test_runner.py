"""A sink may raise, hang or be slow: it costs itself, and one warning."""

from __future__ import annotations

import logging
import os
import sys
import threading

import pytest
import torch
from sink_batches import event, step

import surefoot as sf
from counted import calls
from patience import HANG_SECONDS, run, wait_until
from surefoot.record.messages import Batch
from surefoot.record.sinks.batch_queue import MOST_EVENTS_HELD
from surefoot.record.sinks.runner import SinkRunner, close_all


class Collecting:
    def __init__(self):
        self.batches, self.closed = [], 0

    def write(self, batch):
        self.batches.append(batch)

    def close(self):
        self.closed += 1


class Raising(Collecting):
    def __init__(self, failures=10**9, error=None):
        super().__init__()
        self.calls, self.failures, self.error = 0, failures, error or ValueError("the disk is on fire")

    def write(self, batch):
        self.calls += 1
        if self.calls <= self.failures:
            raise self.error
        super().write(batch)


class Stuck(Collecting):
    """Takes the first batch and then stands still until it is let go."""

    def __init__(self):
        super().__init__()
        self.entered, self.let_go = threading.Event(), threading.Event()

    def write(self, batch):
        self.entered.set()
        self.let_go.wait(HANG_SECONDS)
        super().write(batch)


def of(number):
    return Batch(steps=[step(number)])


def test_batches_arrive_in_order_and_the_sink_is_closed_once():
    sink = Collecting()
    runner = SinkRunner(sink)
    batches = [of(i) for i in range(50)]
    for batch in batches:
        runner.offer(batch)
    runner.close()
    runner.close()
    runner.offer(of(99))
    assert sink.batches == batches
    assert sink.closed == 1
    assert runner.dropped == 1


def test_one_that_always_raises_is_warned_about_once_and_given_up_with_one_more_line(caplog):
    sink = Raising()
    runner = SinkRunner(sink, attempts=4, pause_seconds=0.001)
    for number in range(20):
        runner.offer(of(number))
    assert not runner.flush(HANG_SECONDS)
    runner.offer(of(20))
    runner.close()
    assert (sink.calls, sink.closed, runner.given_up, runner.dropped) == (4, 1, True, 21)
    first, last = caplog.messages
    assert "Raising failed (ValueError: the disk is on fire)" in first
    assert "disabled after 4 consecutive failures" in last


@pytest.mark.parametrize("error", [RuntimeError("x"), SystemExit(3), KeyboardInterrupt()])
def test_one_that_recovers_loses_nothing(error, caplog):
    sink = Raising(failures=2, error=error)
    runner = SinkRunner(sink, pause_seconds=0.001)
    batches = [of(i) for i in range(5)]
    for batch in batches:
        runner.offer(batch)
    runner.close()
    assert sink.batches == batches
    assert runner.dropped == 0
    assert len(caplog.messages) == 1


def test_one_batch_that_cannot_be_written_does_not_cost_the_others():
    class Picky(Collecting):
        def write(self, batch):
            if batch.steps[0].step == 1:
                raise ValueError("not this one")
            super().write(batch)

    sink = Picky()
    runner = SinkRunner(sink, pause_seconds=0.001)
    for number in range(4):
        runner.offer(of(number))
    runner.close()
    assert [batch.steps[0].step for batch in sink.batches] == [0, 2, 3]
    assert (runner.dropped, runner.given_up) == (1, False)


def test_when_the_queue_is_full_the_oldest_rows_go_and_their_events_stay(caplog):
    sink = Stuck()
    runner = SinkRunner(sink, capacity=3)
    runner.offer(of(0))
    assert sink.entered.wait(HANG_SECONDS)
    for number in range(1, 11):
        runner.offer(Batch(steps=[step(number)], events=[event(number=number)]))
    sink.let_go.set()
    runner.close()
    assert [row.step for batch in sink.batches for row in batch.steps] == [0, 8, 9, 10]
    assert [item.step for batch in sink.batches for item in batch.events] == list(range(1, 11))
    assert runner.dropped == 7
    assert len(caplog.messages) == 1
    assert "Stuck does not keep up" in caplog.messages[0]


def test_the_events_that_are_kept_are_bounded_too():
    sink = Stuck()
    runner = SinkRunner(sink, capacity=1)
    runner.offer(of(0))
    assert sink.entered.wait(HANG_SECONDS)
    for _ in range(3):
        runner.offer(Batch(events=[event()] * MOST_EVENTS_HELD))
    sink.let_go.set()
    runner.close()
    assert len(sink.batches[-1].events) == MOST_EVENTS_HELD
    assert runner.dropped == 2 * MOST_EVENTS_HELD


def test_closing_is_bounded_in_time_however_many_hang(caplog):
    waits = []

    class Noted(SinkRunner):
        def close(self, timeout=5.0):
            waits.append(timeout)
            super().close(timeout)

    sinks = [Stuck(), Stuck(), Collecting()]
    runners = [Noted(sink) for sink in sinks]
    for runner in runners:
        runner.offer(of(0))
    close_all(runners, 0.3)
    assert 0.0 <= waits[0] <= 0.3
    assert waits[1:] == [0.0, 0.0], "the first used the time of all of them"
    assert sum("Stuck did not finish in time" in message for message in caplog.messages) == 2
    assert not any(sink.let_go.is_set() for sink in sinks[:2])
    wait_until(lambda: sinks[2].closed == 1)
    for sink in sinks[:2]:
        sink.let_go.set()


def test_a_sink_that_wants_to_is_told_that_time_passes(caplog, monkeypatch):
    monkeypatch.setattr("surefoot.record.sinks.runner.TICK_SECONDS", 0.01)

    class Ticking(Collecting):
        ticked = threading.Event()

        def tick(self):
            self.ticked.set()
            raise OSError("a tick that fails")

    sink = Ticking()
    runner = SinkRunner(sink)
    assert sink.ticked.wait(HANG_SECONDS)
    runner.offer(of(0))
    runner.close()
    assert len(sink.batches) == 1
    assert len(caplog.messages) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_in_a_fork_it_does_nothing_and_does_not_wait():
    sink = Stuck()
    runner = SinkRunner(sink, capacity=1)
    runner.offer(of(0))
    assert sink.entered.wait(HANG_SECONDS)
    with runner._queue.changed:  # held by a thread that the child does not have
        child = os.fork()
        if child == 0:
            runner.offer(of(1))
            runner.flush()
            runner.close()
            os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    sink.let_go.set()
    runner.close()
    assert len(sink.batches) == 1


class Loop:
    """A small training loop that logs every step; a stretch at a time, so that two can take turns."""

    def __init__(self, folder, sinks):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.inputs = torch.randn(128, 64)
        self.log = sf.RunLog(folder, sinks=sinks)
        self.steps, self.calls = 0, []
        """What the training thread did for the log, in the last step."""

    def stretch(self, steps=10):
        for _ in range(steps):
            loss = self.model(self.inputs).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            row = step(self.steps, loss.item())
            with calls() as self.calls:
                self.log.take(row)
            self.steps += 1
        assert self.log.flush(HANG_SECONDS)  # so that the sinks get a batch per stretch


def test_sinks_that_hang_and_raise_cost_the_training_loop_nothing(tmp_path, caplog):
    caplog.set_level(logging.WARNING, logger="surefoot")
    stuck = Stuck()
    plain, broken = Loop(tmp_path / "plain", []), Loop(tmp_path / "broken", [stuck, Raising()])
    plain.stretch()
    broken.stretch()
    assert stuck.entered.wait(HANG_SECONDS)
    wait_until(lambda: "Raising failed" in caplog.text)
    for _ in range(29):
        plain.stretch()
        broken.stretch()
        assert broken.calls == plain.calls
    assert stuck.batches == [], "the loop went on without it"
    stuck.let_go.set()
    plain.log.close()
    broken.log.close()
    assert sum("Raising failed" in message for message in caplog.messages) == 1
    assert sf.load_run(broken.log.folder).scalars["loss"].equals(sf.load_run(plain.log.folder).scalars["loss"])


def test_a_program_with_such_sinks_ends_without_them(tmp_path):
    code = f"""
import time, logging, sys, threading
import surefoot as sf
import surefoot.record.writer as writer
writer.SINK_SECONDS = 0.5
from surefoot.record.messages import StepRow
logging.basicConfig(level="WARNING")
tries, tried_twice = [], threading.Event()
class Bad:
    def write(self, batch):
        tries.append(1)
        if len(tries) == 2: tried_twice.set()
        raise ValueError("no")
    def close(self): raise ValueError("no")
class Slow:
    def write(self, batch): time.sleep(1e6)
    def close(self): time.sleep(1e6)
log = sf.RunLog({str(tmp_path)!r}, sinks=[Bad(), Slow(), Slow(), Slow()])
for number in range(100):
    log.take(StepRow(number, time.time(), loss=1.0))
tried_twice.wait()
"""
    done = run([sys.executable, "-c", code], check=True)
    assert done.stderr.count("Bad failed") == 1
    assert done.stderr.count("Slow did not finish in time") == 3
    assert sf.load_run(tmp_path).scalars.num_rows == 100
