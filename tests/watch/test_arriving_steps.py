"""Sampled steps are passed on in their order, complete."""

from __future__ import annotations

import pytest
import torch

from surefoot.record.facts import LossTerm, SampledStep
from surefoot.watch import deferred
from surefoot.watch.arriving_steps import ArrivalQueue
from surefoot.watch.deferred import number


def sampled(step, value):
    term = LossTerm(site="", op="mul", value=value, norm=0.0, reach=1)
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
