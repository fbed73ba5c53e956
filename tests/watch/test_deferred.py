"""Numbers that are read later: the same values as at once, in one copy, in their places."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from surefoot.record.facts import LossTerm, SampledStep
from surefoot.watch import deferred
from surefoot.watch.deferred import (
    ABSENT,
    ArrivalQueue,
    Count,
    Deferred,
    begin_copy,
    later,
    number,
    numbers,
    own,
    read,
    read_each,
)


@pytest.fixture
def away(monkeypatch):
    """Treat the CPU like a device whose numbers cannot be read at once."""
    monkeypatch.setattr(deferred, "READ_AT_ONCE", set())
    yield
    begin_copy()


@dataclass(frozen=True)
class Facts:
    name: str
    value: float
    many: list[float]
    inner: Facts | None = None


def test_numbers_on_the_cpu_are_read_at_once():
    assert number(torch.tensor(0.1)) == float(torch.tensor(0.1))
    assert number(torch.tensor([3])) == 3
    assert numbers(torch.tensor([1.0, 2.0])) == [1.0, 2.0]
    assert later(lambda value, rows: (value, rows.shape), torch.tensor(2), torch.zeros(3)) == (2, torch.Size([3]))


def test_deferred_numbers_keep_every_bit(away):
    values = {
        torch.float32: [0.1, -math.inf, 1e-45],
        torch.float64: [0.1, 1e300, -0.0],
        torch.int64: [2**53 + 1, -1, 0],
        torch.bool: [True, False, True],
        torch.bfloat16: [0.5, 1.0, -2.0],
        torch.uint8: [255, 0, 7],
    }
    held = {kind: [number(torch.tensor(value, dtype=kind)) for value in row] for kind, row in values.items()}
    rows = {kind: later(lambda tensor: tensor, torch.tensor(row, dtype=kind)) for kind, row in values.items()}
    begin_copy()
    for kind, row in values.items():
        expected = torch.tensor(row, dtype=kind)
        assert read(held[kind]) == expected.tolist()
        assert [type(value) for value in read(held[kind])] == [type(value) for value in expected.tolist()]
        assert torch.equal(read(rows[kind]), expected)
    assert math.isnan(number(torch.tensor(math.nan)).read())


def test_facts_are_read_with_every_value_in_its_place(away):
    vector = numbers(torch.arange(3.0))
    facts = Facts("a", number(torch.tensor(1.5)), vector, Facts("b", 2.0, [later(lambda value: value + 1, vector[2])]))
    assert isinstance(facts.value, Deferred)
    assert read(facts) == Facts("a", 1.5, [0.0, 1.0, 2.0], Facts("b", 2.0, [3.0]))


def test_facts_without_deferred_values_are_not_copied(away):
    facts = Facts("a", 1.0, [2.0])
    assert read(facts) is facts


def test_elements_that_turn_out_to_be_absent_leave_their_list(away):
    found = [later(lambda value: value if value > 1 else ABSENT, torch.tensor(float(each))) for each in range(4)]
    assert read(found) == [2.0, 3.0]
    assert read_each(found) == [2.0, 3.0]


def test_a_tensor_of_the_script_is_read_as_it_was(away):
    value = torch.tensor(1.0)
    found = number(own(value))
    value.fill_(2.0)
    assert found.read() == 1.0


def test_a_copy_lets_the_tensors_go_and_brings_all_that_waited(away):
    first, second = number(torch.tensor(1.0)), number(torch.tensor(2))
    copy = begin_copy()
    assert copy is not None
    assert copy.has_arrived()
    assert first.tensor is None
    assert second.tensor is None
    assert (second.read(), first.read()) == (2, 1.0)


def test_a_copy_begins_by_itself_when_much_is_waiting(away, monkeypatch):
    monkeypatch.setattr(deferred, "MOST_BYTES", 1_000)
    found = later(lambda rows: float(rows.sum()), torch.ones(1_000))
    assert not deferred._waiting.sources
    assert found.read() == 1_000.0


def test_later_takes_what_is_deferred_and_what_is_not(away):
    found = later(lambda a, b, c: (a, b, c), number(torch.tensor(1.0)), 2, None)
    assert found.read() == (1.0, 2, None)


def test_a_count_adds_up_answers_that_come_later(away):
    count = Count()
    count.add(True)
    count.add(False)
    count.add(later(bool, torch.tensor(3.0)))
    count.add(later(bool, torch.tensor(0.0)))
    assert count.value == 2
    assert count.value == 2


def test_neither_autograd_nor_a_mode_takes_part(away):
    weight = nn.Parameter(torch.ones(3))
    found = number(weight.sum())
    assert begin_copy() is not None
    assert found.read() == 3.0


def test_a_part_of_something_large_does_not_keep_the_whole_alive(away):
    whole = torch.arange(10_000.0)
    part, small = number(whole[7]), numbers(torch.arange(3.0)[1:])
    held = [source.tensor.untyped_storage().nbytes() for source in deferred._waiting.sources[-2:]]
    assert held == [4, 12]
    whole.zero_()
    assert read(part) == 7.0
    assert read(small) == [1.0, 2.0]


def sampled(step, value):
    term = LossTerm(site="", op="mul", value=value, norm=0.0)
    return SampledStep(step=step, breaks=[term])


def test_a_step_whose_numbers_are_all_there_is_passed_on_at_once():
    kept = []
    steps = ArrivalQueue(kept.append)
    steps.add(sampled(0, 1.0), has_deferred=False)
    steps.settle(wait=False)
    assert kept == [sampled(0, 1.0)]


@pytest.mark.parametrize("wait", [True, False])
def test_steps_are_passed_on_in_their_order_with_their_numbers(monkeypatch, wait):
    monkeypatch.setattr(deferred, "READ_AT_ONCE", set())
    kept = []
    steps = ArrivalQueue(kept.append)
    steps.add(sampled(0, number(torch.tensor(1.0))), has_deferred=True)
    steps.add(sampled(1, 2.0), has_deferred=False)
    steps.settle(wait)
    assert kept == [sampled(0, 1.0), sampled(1, 2.0)]
    assert steps.waiting == []
