"""Which steps are repeated, which are left out, and when that ends."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.decide.recovery import TrainingRecovery
from surefoot.decide.repeat import (
    MOST_LEFT_OUT,
    MOST_TRIES,
    RECURRENCE_STEPS,
    RepeatPlanner,
    RepeatState,
    first_outlier,
    give_up,
    observe,
    overflowed_steps,
    plan,
    plan_test,
    plan_without,
    risen_losses,
    unusual_gradients,
)
from surefoot.types import Decision, Signals, StepRecord

ATTEMPTS, CALM = 3, 50


def test_the_first_time_every_step_is_repeated_as_it_was():
    state = plan(RepeatState(), onset=70, last=79, reached=80, attempts=ATTEMPTS)
    assert (state.tries, state.until, state.left_out) == (1, 80, ())


def test_the_second_time_the_step_that_it_began_with_is_left_out():
    state = plan(RepeatState(), 70, 79, 80, ATTEMPTS)
    assert plan(state, 70, 72, 73, ATTEMPTS).left_out == (70,)
    assert plan(state, 70, 72, 73, ATTEMPTS, suspect=68).left_out == (68,)


def test_the_third_time_every_step_up_to_the_last_unhealthy_one_is_left_out():
    state = plan(plan(RepeatState(), 70, 79, 80, ATTEMPTS), 70, 72, 73, ATTEMPTS)
    assert plan(state, 71, 73, 74, ATTEMPTS).left_out == tuple(range(69, 80))


def test_then_the_data_are_not_to_blame():
    state = RepeatState()
    for _ in range(MOST_TRIES):
        state = plan(state, 70, 72, 80, ATTEMPTS)
    assert plan(state, 70, 72, 80, ATTEMPTS) is None


def test_another_trouble_has_tries_of_its_own_and_earlier_bad_batches_stay_out():
    state = plan(plan(RepeatState(), 70, 79, 80, ATTEMPTS), 70, 72, 73, ATTEMPTS)
    later = plan(state, 95, 99, 100, ATTEMPTS)
    assert (later.tries, later.troubles, later.left_out) == (1, 2, (70,))
    assert plan(later, 95, 99, 100, ATTEMPTS).left_out == (70, 95)


def test_troubles_are_given_back_by_calm_stretches():
    state = RepeatState()
    for onset in (100, 200, 300):
        state = plan(state, onset, onset + 5, onset + 6, ATTEMPTS)
    assert plan(state, 400, 405, 406, ATTEMPTS) is None
    for step in range(306, 306 + CALM):
        state, _ = observe(state, step, False, CALM)
    assert plan(state, 400, 405, 406, ATTEMPTS) is not None


def test_a_few_unhealthy_steps_among_the_repeated_ones_show_that_it_came_back():
    state = plan(RepeatState(), 70, 79, 80, ATTEMPTS)
    came_back = []
    for step in range(60, 80):
        state, again = observe(state, step, step >= 70, CALM)
        came_back += [step] * again
    assert came_back[0] == 70 + RECURRENCE_STEPS - 1


def test_after_the_repeated_steps_the_usual_patience_counts():
    state = plan(RepeatState(), 70, 79, 80, ATTEMPTS)
    assert not any(observe(state, step, True, CALM)[1] for step in range(80, 200))


def test_a_repeat_that_was_given_up_is_not_asked_for_again():
    state = give_up(plan(RepeatState(), 70, 79, 80, ATTEMPTS))
    for step in range(60, 80):
        state, again = observe(state, step, True, CALM)
        assert not again


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 40)), max_size=60))
def test_whatever_comes_repeats_end_and_few_steps_are_left_out(troubles):
    state, made = RepeatState(), 0
    for onset, length in troubles:
        planned = plan(state, onset, onset + length, onset + length + 1, ATTEMPTS)
        if planned is None:
            continue
        made += 1
        state = planned
    assert made <= ATTEMPTS * MOST_TRIES
    assert len(state.left_out) <= ATTEMPTS * (MOST_LEFT_OUT + 1)


def record(step, loss, skipped=False):
    return StepRecord(Signals(step, loss=loss, grad_norm=1.0), skipped)


@pytest.mark.parametrize("skipped", [False, True])
def test_the_first_outlier_that_was_applied_is_the_suspect(skipped):
    losses = [1.0 + 0.05 * (step % 3) for step in range(60)]
    losses[50], losses[55] = 40.0, 9.0
    records = [record(step, loss, skipped and step == 50) for step, loss in enumerate(losses)]
    assert first_outlier(records, 40, 58) == (55 if skipped else 50)
    assert first_outlier(records, 51, 54) is None


def test_with_few_steps_to_compare_with_there_is_no_suspect():
    assert first_outlier([record(0, 1.0), record(1, 100.0)], 0, 1) is None


RETURN = Decision("roll_back", before=40)


def test_without_repeats_nothing_is_planned_and_advice_is_passed_on():
    planner = RepeatPlanner(TrainingRecovery())
    assert planner.state is None
    assert planner.plan(RETURN, 52, 53, 40, ()) is None
    assert planner.advise(52, True, RETURN) is RETURN
    planner.give_up()
    assert planner.state is None


def test_trouble_that_comes_back_among_repeated_steps_calls_for_a_return_at_once():
    recovery = TrainingRecovery(repeat=True)
    planner = RepeatPlanner(recovery)
    planner.state = planner.plan(RETURN, 52, 53, 40, ())
    onset = 40 + recovery.margin_steps
    assert (planner.state.onset, planner.state.until) == (onset, 53)
    found = [planner.advise(step, True, Decision()) for step in range(onset, 53)]
    first = next(each for each in found if each.action != "none")
    assert (first.action, first.before, first.only_repeat) == ("roll_back", 40, True)
    planner.give_up()
    assert planner.advise(52, True, Decision()) == Decision()


def test_steps_are_tested_once_and_only_a_few_times():
    state = plan_test(RepeatState(), 70, 70, 71, ATTEMPTS)
    assert (state.tries, state.until, state.left_out, state.is_test) == (1, 71, (), True)
    assert plan_test(state, 70, 70, 71, ATTEMPTS) is None
    for step in (75, 80):
        state = plan_test(state, step, step, step + 1, ATTEMPTS)
    assert plan_test(state, 85, 85, 86, ATTEMPTS) is None
    for step in range(81, 81 + CALM):
        state, _ = observe(state, step, False, CALM)
    assert plan_test(state, 200, 200, 201, ATTEMPTS) is not None


def test_what_recurs_in_a_test_leaves_nothing_out():
    state = plan_test(RepeatState(), 70, 70, 80, ATTEMPTS)
    for step in range(60, 80):
        state, again = observe(state, step, step >= 70, CALM)
        assert not again


@pytest.mark.parametrize(("tested", "onset", "left_out"), [(65, 70, (70,)), (70, 70, ()), (65, 81, ())])
def test_after_a_test_the_first_step_is_left_out_only_if_the_test_has_shown_that_it_recurs(tested, onset, left_out):
    """A test of step 70 may have returned to a moment, up to `margin_steps` before it, with damaged weights."""
    planner = RepeatPlanner(TrainingRecovery(repeat=True))
    planner.state = plan_test(RepeatState(), 70, tested, 80, ATTEMPTS)
    found = planner.plan(Decision("roll_back", before=onset - 5), 90, 91, 60, ())
    assert (found.left_out, found.troubles, found.is_test) == (left_out, 1, False)


def test_a_series_of_bad_batches_is_left_out_at_once_unless_it_is_long():
    state = plan_without(RepeatState(), 70, 77, 82, ATTEMPTS)
    assert (state.tries, state.left_out) == (MOST_TRIES, tuple(range(70, 78)))
    assert plan_without(RepeatState(), 70, 70 + MOST_LEFT_OUT, 120, ATTEMPTS) is None


def with_norms(norms):
    return [StepRecord(Signals(step, grad_norm=norm), False) for step, norm in enumerate(norms)]


@pytest.mark.parametrize("length", [2, 5, 8])
def test_gradients_far_above_all_before_are_found_when_they_end(length):
    norms = [1.0 + 0.5 * (step % 3) for step in range(50)] + [30.0] * length
    found = [unusual_gradients(with_norms(norms[:end])) for end in range(50, len(norms) + 1)]
    found.append(unusual_gradients(with_norms([*norms, 1.0])))
    assert [each for each in found if each is not None] == [50]


@pytest.mark.parametrize("norms", [[30.0], [30.0, 14.0], [18.0, 18.0]])
def test_one_large_gradient_or_less_than_ten_times_the_others_is_not_worth_a_test(norms):
    before = [1.0 + 0.5 * (step % 3) for step in range(50)]
    assert unusual_gradients(with_norms([*before, *norms, 1.5])) is None


@pytest.mark.parametrize(
    ("last", "first"),
    [
        ([0.2, 0.5, 1.0, 0.1, 4.0, 3.0, 3.5, 9.0, 2.0, 5.0, 4.0, 6.0], 71),  # rises little by little
        ([0.1, 0.2, 0.1, 0.3, 9.0, 0.1, 9.0, 0.2, 9.0, 0.1, 0.2, 9.0], None),  # single outliers
        ([4.0, 3.0, 3.5, 9.0, 2.0, 5.0, 4.0, 6.0, 4.0, 3.0, 3.5, 9.0, 4.0, 5.0], None),  # it had risen before
        ([0.3, 0.2, 0.3, 0.4, 0.3, 0.4, 0.5, 0.3, 0.2, 0.4, 0.3, 0.5], None),
    ],
)
def test_losses_of_which_most_are_far_above_all_before_are_worth_a_test_once(last, first):
    losses = [0.1 + 0.1 * (step % 3) for step in range(96 - len(last))] + last
    records = [StepRecord(Signals(step, loss=loss), False) for step, loss in enumerate(losses)]
    assert risen_losses(records) == first
    assert risen_losses(records[:-1]) is None


def with_overflows(pattern):
    """An `o` is a step that overflowed, a dot one that was applied."""
    return [
        StepRecord(Signals(step, 1.0, 1.0, 0.0), skipped=mark == "o", overflow=mark == "o")
        for step, mark in enumerate(pattern)
    ]


@pytest.mark.parametrize(
    ("pattern", "first"), [("..ooo.", 2), ("..oooooo.", 2), ("..oo.", None), ("..ooo", None), ("..ooo..", None)]
)
def test_overflows_at_smaller_and_smaller_scales_are_worth_a_test_when_they_end(pattern, first):
    assert overflowed_steps(with_overflows(pattern)) == first


def test_a_run_that_looks_for_its_first_loss_scale_is_not_tested():
    assert overflowed_steps(with_overflows("oooooo.")) is None


def test_after_a_test_the_step_at_which_the_problem_shows_is_left_out_and_not_the_first_repeated_one():
    state = plan_test(RepeatState(), 50, 50, 80, ATTEMPTS)
    assert plan(state, 70, 79, 80, ATTEMPTS).left_out == (70,)


def test_a_suspicion_leads_to_a_test_unless_something_is_decided():
    planner = RepeatPlanner(TrainingRecovery(repeat=True))
    tested = planner.advise(70, True, Decision(), (69, "the reason"))
    assert (tested.action, tested.before, tested.is_test, tested.reason) == ("roll_back", 69, True, "the reason")
    assert planner.advise(70, True, RETURN, (69, "the reason")) is RETURN
    assert planner.plan(tested, 70, 71, 60, ()).is_test
