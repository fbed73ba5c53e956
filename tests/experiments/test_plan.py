"""Which changes are run, in which order, and how long."""

import pytest

from surefoot.diagnose.run import RecordedRun
from surefoot.errors import UsageError
from surefoot.experiments.plan import BY_NAME, CHANGES, chosen, in_turn, nothing_to_change, order_for, warmup_steps
from surefoot.experiments.run_comparison import RunReading
from surefoot.record.facts import RunFacts


def reading(outcome="non-finite", failed_at=40, **given):
    return RunReading(outcome, 300, failed_at, **given)


def test_changes_are_chosen_by_name_in_the_order_of_the_plan():
    assert chosen("") == list(CHANGES)
    assert [change.name for change in chosen("clip, LR-3")] == ["lr-3", "clip"]
    with pytest.raises(UsageError, match="no change 'magic'"):
        chosen("magic")


def test_what_would_fix_the_named_cause_comes_first():
    turns = in_turn(chosen("lr-3,clip,fp32"), {"fp32": ""})
    assert [change.name for change in turns] == ["fp32", "lr-3", "clip"]


def test_a_slower_change_gets_more_steps():
    plain = order_for(BY_NAME["clip"], reading(), 60.0)["steps"]
    slow = order_for(BY_NAME["lr-10"], reading(), 60.0)["steps"]
    assert slow > plain >= 200
    assert "steps" not in order_for(BY_NAME["clip"], reading(outcome="stuck", failed_at=None), 60.0)
    assert order_for(None, reading(), 60.0)["steps"] == 90


def test_orders_carry_what_their_change_needs():
    assert order_for(BY_NAME["skip-batch"], reading(bad_steps=(40,)), 1.0)["skip_steps"] == [40]
    assert order_for(BY_NAME["reset-moments"], reading(), 1.0)["reset_at"] == 39
    assert order_for(BY_NAME["warm-up"], reading(), 1.0)["warmup_steps"] == warmup_steps(reading()) == 200


def test_no_run_is_spent_on_a_change_that_has_nothing_to_change():
    run = RecordedRun(
        RunFacts.from_json({"experiment": {"seen": {"devices": ["cpu"], "has_state": True, "dtypes": []}}})
    )
    assert nothing_to_change(BY_NAME["clip"], run, reading()) == "no optimizer ever stepped"
    assert nothing_to_change(BY_NAME["deterministic"], run, reading()) == "everything runs on the CPU"
    assert nothing_to_change(BY_NAME["fp32"], run, reading()) is None
