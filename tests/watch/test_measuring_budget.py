"""Which steps on a device are measured in full."""

import time
from itertools import pairwise

from surefoot.watch.measuring_budget import (
    FIRST_STEPS,
    LONGEST_GAP,
    LONGEST_GAP_WITH_NORMS,
    SECONDS_AT_FIRST,
    STEPS_AFTER_TROUBLE,
    MeasuringBudget,
)


def measured(budget: MeasuringBudget, steps: range, cost: float) -> list[int]:
    found = []
    for step in steps:
        budget.begin_step(step)
        if budget.measures:
            found.append(step)
            budget.spend(cost)
    return found


def test_while_measuring_costs_nothing_every_step_is_measured():
    budget = MeasuringBudget()
    assert measured(budget, range(5_000), 0.0) == list(range(5_000))
    assert budget.measured_all


def test_the_first_steps_are_measured_whatever_they_cost_and_then_one_in_seven():
    budget = MeasuringBudget()
    budget.spend(3_600.0)
    found = measured(budget, range(FIRST_STEPS + 10 * LONGEST_GAP), 1.0)
    assert found[: FIRST_STEPS + 1] == list(range(FIRST_STEPS + 1))
    assert found[FIRST_STEPS + 1 :] == [FIRST_STEPS + LONGEST_GAP * turn for turn in range(1, 10 + 1)][:-1]
    assert not budget.measured_all


def test_what_was_spent_once_on_the_first_steps_does_not_count():
    budget = MeasuringBudget()
    budget.spend(3_600.0)
    assert measured(budget, range(FIRST_STEPS + 50), 1e-6) == list(range(FIRST_STEPS + 50))
    assert budget.measured_all


def test_after_trouble_every_step_is_measured_for_a_while():
    budget = MeasuringBudget()
    measured(budget, range(1_000), 1.0)
    budget.expect_trouble(1_000)
    found = measured(budget, range(1_000, 1_200), 1.0)
    assert found[:STEPS_AFTER_TROUBLE] == list(range(1_000, 1_000 + STEPS_AFTER_TROUBLE))
    assert len(found) < 100


def test_only_the_first_spikes_are_followed():
    budget = MeasuringBudget()
    for spike in range(6):
        measured(budget, range(1_000 * spike, 1_000 * spike + 500), 1.0)
        budget.after_spike(1_000 * spike + 500)
        found = measured(budget, range(1_000 * spike + 500, 1_000 * spike + 564), 1.0)
        assert (len(found) == STEPS_AFTER_TROUBLE) == (spike < 3)


def test_cheap_steps_are_paid_for_by_the_share_of_the_time():
    budget = MeasuringBudget()
    budget.begin_step(0)
    budget._began = time.perf_counter() - 1_000.0  # a thousand seconds of training: ten of them may be spent
    found = measured(budget, range(1_000, 2_000), SECONDS_AT_FIRST / 100)
    assert found == list(range(1_000, 2_000))


def test_where_the_script_computes_the_norm_fewer_steps_are_measured():
    budget = MeasuringBudget()
    measured(budget, range(FIRST_STEPS + 1), 1.0)
    budget.norms_are_known = True
    found = measured(budget, range(FIRST_STEPS + 1, 500), 1.0)
    assert {after - before for before, after in pairwise(found)} == {LONGEST_GAP_WITH_NORMS}
    budget.norms_are_known = False
    assert {after - before for before, after in pairwise(measured(budget, range(500, 600), 1.0))} == {LONGEST_GAP}
