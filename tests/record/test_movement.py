"""Whether a rank moves: looks at a thread that this test moves by hand, with time that passes as it says."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from surefoot.core.activity import Work
from surefoot.core.stacks import Position
from surefoot.record.movement import MovementMeter

LIMIT = 30.0


def at(line=1, functions=(1,), waits_in="", in_debugger=False):
    return Position(((1, line),), functions, f"train.py:{line}", "step", waits_in, in_debugger)


@dataclass
class Rank:
    """A rank, as the meter sees it."""

    position: Position = field(default_factory=at)
    steps: int = 0
    work: Work = field(default_factory=lambda: Work(0.0, 0))

    def __post_init__(self):
        look = {"look": lambda thread: self.position, "work": lambda: self.work}
        self.meter = MovementMeter(LIMIT, 1.0, lambda: self.steps, lambda: 1, **look)

    def after(self, seconds, cpu=0.0, moved=0, queued=0.0):
        """What it does after so many seconds, with this use of a CPU, bytes and waits for its turn per second."""
        for _ in range(seconds):
            before = self.work
            self.work = Work(before.cpu_seconds + cpu, before.bytes_moved + moved, before.queued_seconds + queued)
            standing = self.meter.look(1.0)
        return standing


@pytest.mark.parametrize(("waits_in", "movement"), [("", "stands"), ("torch.distributed.barrier", "waits")])
def test_a_rank_that_neither_moves_nor_works_for_the_limit_stands_or_waits(waits_in, movement):
    rank = Rank(at(waits_in=waits_in))
    assert rank.after(28).movement == "moves"
    standing = rank.after(6)
    assert (standing.movement, standing.position.where) == (movement, "train.py:1")
    assert LIMIT <= standing.seconds <= LIMIT + 6


def test_a_loop_that_sleeps_and_looks_stands_wherever_it_is_met():
    rank = Rank()
    for second in range(60):
        rank.position = at(line=1 + second % 2)
        standing = rank.after(1, cpu=0.01)
    assert standing.movement == "stands"


@pytest.mark.parametrize(("cpu", "moved"), [(0.3, 0), (0.0, 200_000)], ids=["computes", "writes to a slow disk"])
def test_a_rank_that_works_in_one_line_is_busy_and_not_idle(cpu, moved):
    rank = Rank()
    assert rank.after(300, cpu, moved).movement == "busy"


def test_a_long_evaluation_in_one_function_moves():
    rank = Rank()
    for second in range(300):
        rank.position = at(line=second % 7)
        assert rank.after(1, cpu=1.0).movement == "moves"


def test_a_rank_that_is_met_in_many_places_moves_however_little_its_cpu_has_to_do():
    rank = Rank()
    for second in range(300):
        rank.position = at(line=second % 40)
        assert rank.after(1).movement == "moves"


def test_steps_and_other_functions_are_movement_however_little_is_computed():
    rank = Rank()
    for _ in range(20):
        rank.steps += 1
        assert rank.after(20).movement == "moves"
    for number in range(20):
        rank.position = at(functions=(1, number))
        assert rank.after(20).movement == "moves"


def test_a_rank_that_stops_after_hard_work_stands_soon_after_the_limit():
    rank = Rank()
    rank.after(120, cpu=1.0)
    assert rank.after(42).movement == "stands"


def test_a_debugger_is_no_stop():
    rank = Rank(at(in_debugger=True))
    assert rank.after(300).movement == "debugged"


def test_a_machine_that_slept_has_not_waited():
    rank = Rank()
    rank.after(5)
    rank.meter.look(3600.0)
    assert rank.after(5).movement == "moves"


def test_on_a_busy_machine_a_rank_that_hardly_gets_a_cpu_works_and_a_loop_that_looks_does_not():
    assert Rank().after(300, cpu=0.02, queued=0.9).movement == "busy"
    assert Rank().after(300, cpu=0.005, queued=0.3).movement == "stands"
