"""What is planned when steps are to be repeated."""

import surefoot as sf
from surefoot.guard.repeat_planner import RepeatPlanner
from surefoot.types import Decision

RETURN = Decision("roll_back", before=40)


def test_without_repeats_nothing_is_planned_and_advice_is_passed_on():
    planner = RepeatPlanner(sf.TrainingRecovery())
    assert planner.state is None
    assert planner.plan(RETURN, 52, 53, 40, ()) is None
    assert planner.advise(52, True, RETURN) is RETURN
    planner.give_up()
    assert planner.state is None


def test_trouble_that_comes_back_among_repeated_steps_calls_for_a_return_at_once():
    recovery = sf.TrainingRecovery(repeat=True)
    planner = RepeatPlanner(recovery)
    planner.state = planner.plan(RETURN, 52, 53, 40, ())
    onset = 40 + recovery.margin_steps
    assert (planner.state.onset, planner.state.until) == (onset, 53)
    found = [planner.advise(step, True, Decision()) for step in range(onset, 53)]
    first = next(each for each in found if each.action != "none")
    assert (first.action, first.before, first.only_repeat) == ("roll_back", 40, True)
    planner.give_up()
    assert planner.advise(52, True, Decision()) == Decision()
