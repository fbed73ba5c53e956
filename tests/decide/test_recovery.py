"""`Escalation` and `TrainingRecovery`: what is done about anomalous steps, and its budgets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import surefoot as sf
from surefoot.decide.recovery import EscalationState, burst_end, was_bad_batch
from surefoot.types import Signals, StepRecord

# ---- Escalation -----------------------------------------------------------------------------------------------------


settings = st.builds(
    sf.Escalation,
    skips=st.integers(0, 4),
    cuts=st.integers(0, 3),
    lr_factor=st.sampled_from([0.25, 0.5, 1.0]),
    calm_steps=st.integers(1, 6),
)
anomalies = st.lists(st.booleans(), min_size=10, max_size=60)


def escalation_decisions(escalation, stream, state=None):
    state, found = state or escalation.init(), []
    for anomalous in stream:
        state, decision = escalation.update(state, anomalous, "because")
        found.append(decision)
    return state, found


def escalation_actions(escalation, stream):
    return [decision.action for decision in escalation_decisions(escalation, stream)[1]]


def test_skip_then_back_off_then_halt():
    escalation = sf.Escalation(skips=2, cuts=2)
    assert escalation_actions(escalation, [True] * 9) == ["skip", "skip", "back_off"] * 2 + ["skip", "skip", "halt"]


def test_cuts_compound():
    escalation = sf.Escalation(skips=0, cuts=3, lr_factor=0.5)
    assert [decision.lr_factor for decision in escalation_decisions(escalation, [True] * 3)[1]] == [0.5, 0.25, 0.125]


def test_a_cut_stands_on_the_healthy_steps_that_follow():
    escalation = sf.Escalation(skips=0, cuts=3, calm_steps=4)
    found = escalation_decisions(escalation, [True, False, False, False, False, False])[1]
    assert [decision.lr_factor for decision in found] == [0.5, 0.5, 0.5, 0.5, 1.0, 1.0]


def test_calm_refills_the_skips_and_takes_one_cut_back():
    escalation = sf.Escalation(skips=1, cuts=5, calm_steps=3)
    state, _ = escalation_decisions(escalation, [True] * 5)
    assert (state.skips, state.cuts) == (1, 2)
    state, _ = escalation_decisions(escalation, [False] * 3, state)
    assert state == EscalationState(skips=0, cuts=1, calm=0)
    state, _ = escalation_decisions(escalation, [False] * 3, state)
    assert state.cuts == 0


def test_calm_must_be_unbroken():
    escalation = sf.Escalation(skips=2, cuts=0, calm_steps=3)
    assert escalation_actions(escalation, [True, False, False, True, False, False, True])[-1] == "halt"
    assert escalation_actions(escalation, [True, False, False, False, True, False, False, True])[-1] == "skip"


def test_a_healthy_step_asks_for_nothing_and_gives_no_reason():
    _, (decision,) = escalation_decisions(sf.Escalation(), [False])
    assert decision == sf.types.Decision("none", "", 1.0)


def test_a_decision_carries_the_reason_it_was_given():
    assert escalation_decisions(sf.Escalation(), [True])[1][0].reason == "because"


def test_once_halted_it_stays_halted_while_trouble_lasts():
    assert escalation_actions(sf.Escalation(skips=0, cuts=0), [True] * 5) == ["halt"] * 5


@given(settings, anomalies)
def test_the_learning_rate_is_only_ever_cut_and_never_beyond_its_budget(escalation, stream):
    for decision in escalation_decisions(escalation, stream)[1]:
        assert escalation.lr_factor**escalation.cuts <= decision.lr_factor <= 1.0


@given(settings, anomalies)
def test_healthy_steps_are_never_acted_upon_and_anomalous_ones_always_are(escalation, stream):
    for anomalous, action in zip(stream, escalation_actions(escalation, stream), strict=True):
        assert (action != "none") == anomalous


@given(settings, anomalies)
def test_no_budget_is_overdrawn(escalation, stream):
    state = escalation.init()
    for anomalous in stream:
        state, _ = escalation.update(state, anomalous)
        assert 0 <= state.skips <= escalation.skips
        assert 0 <= state.cuts <= escalation.cuts
        assert 0 <= state.calm < escalation.calm_steps


@given(settings)
def test_trouble_without_end_halts_after_every_budget_is_used(escalation):
    allowed = (escalation.skips + 1) * (escalation.cuts + 1) - 1
    assert escalation_actions(escalation, [True] * (allowed + 1)).index("halt") == allowed


def test_a_cut_that_would_raise_the_learning_rate_is_refused():
    with pytest.raises(sf.SettingError, match=r"`lr_factor` must lie in \(0, 1\]; got 2.0. A cut never raises the LR"):
        sf.Escalation(lr_factor=2.0)


# ---- TrainingRecovery -----------------------------------------------------------------------------------------------


HEALTHY, REFUSED, SETBACK, BROKEN = {}, {"refused": True}, {"setback": True}, {"refused": True, "broken": True}
LOST, LEVEL = {"lost": True}, {"level": True}


def recovery_decisions(recovery, stream, first=1_000):
    state, found = recovery.init(), []
    for i, facts in enumerate(stream):
        state, decision = recovery.update(state, first + i, **facts)
        found.append(decision)
    return found


def recovery_actions(recovery, stream):
    return {i: d.action for i, d in enumerate(recovery_decisions(recovery, stream)) if d.action != "none"}


def test_a_spike_that_heals_within_its_patience_is_left_alone():
    assert recovery_actions(sf.TrainingRecovery(), ([SETBACK] * 9 + [HEALTHY] * 5) * 4) == {}


def test_a_low_loss_now_and_then_does_not_end_the_trouble():
    found = recovery_decisions(sf.TrainingRecovery(), [SETBACK, SETBACK, HEALTHY] * 5)
    assert [i for i, d in enumerate(found) if d.action == "roll_back"] == [13]
    assert found[13].before == 1_000 - 5


def test_a_few_refused_steps_are_left_to_skipping():
    assert recovery_actions(sf.TrainingRecovery(), [REFUSED] * 4 + [HEALTHY] + [REFUSED] * 4) == {}


def test_a_loss_that_stays_high_leads_back_to_before_it_rose():
    recovery = sf.TrainingRecovery(margin_steps=5)
    found = recovery_decisions(recovery, [HEALTHY] * 3 + [SETBACK] * 10)
    assert [d.action for d in found] == ["none"] * 12 + ["roll_back"]
    assert found[-1].before == 1_003 - 5
    assert found[-1].lr_factor == 0.5


def test_refused_steps_in_a_row_lead_back():
    assert recovery_actions(sf.TrainingRecovery(), [REFUSED] * 5) == {4: "roll_back"}


def test_weights_that_are_not_finite_lead_back_at_once():
    assert recovery_actions(sf.TrainingRecovery(), [BROKEN]) == {0: "roll_back"}


def test_a_high_loss_of_earlier_weights_shows_that_it_is_the_data_and_costs_nothing():
    found = recovery_decisions(sf.TrainingRecovery(), [SETBACK] * 13)
    assert [d.action for d in found[9:]] == ["roll_back", "none", "none", "take_back"]
    assert found[-1].lr_factor == 1.0


def test_after_a_return_that_was_taken_back_more_patience_is_needed():
    assert recovery_actions(sf.TrainingRecovery(), [SETBACK] * 53) == {9: "roll_back", 12: "take_back", 52: "roll_back"}


def test_refusals_that_go_on_after_a_return_lead_to_an_older_state():
    found = recovery_actions(sf.TrainingRecovery(attempts=3), [REFUSED] * 11)
    assert found == {4: "roll_back", 7: "roll_back", 10: "roll_back"}


def test_a_return_is_made_only_if_the_weights_have_moved_unless_there_is_no_other_way():
    recovery = sf.TrainingRecovery()
    assert recovery_decisions(recovery, [SETBACK] * 10)[-1].only_if_moved
    assert recovery_decisions(recovery, [REFUSED] * 5)[-1].only_if_moved
    assert not recovery_decisions(recovery, [BROKEN])[-1].only_if_moved
    assert not recovery_decisions(recovery, [REFUSED] * 8)[-1].only_if_moved  # the second of two in a row


def test_gradients_that_stay_far_above_all_earlier_ones_lead_back_at_once_if_the_weights_have_moved():
    found = recovery_decisions(sf.TrainingRecovery(), [REFUSED, LEVEL])
    assert [each.action for each in found] == ["none", "roll_back"]
    assert found[-1].only_if_moved
    assert found[-1].before == 1_000 - 5


def test_a_new_level_after_such_a_return_shows_that_it_is_the_data():
    assert recovery_actions(sf.TrainingRecovery(), [REFUSED, LEVEL, REFUSED, LEVEL]) == {1: "roll_back", 3: "take_back"}


def test_a_return_after_which_the_weights_were_damaged_again_stays_and_another_follows():
    recovery, state, found = sf.TrainingRecovery(), sf.TrainingRecovery().init(), {}
    for step in range(20):
        state, decision = recovery.update(state, step, setback=True)
        if decision.action != "none":
            found[step] = decision.action
        if decision.action == "take_back":
            state = recovery.keep_return(state)
    assert found == {9: "roll_back", 12: "take_back", 19: "roll_back"}
    assert recovery.cut(state) == 0.25


def test_weights_that_moved_as_training_does_not_explain_lead_back_whatever_the_loss_is():
    recovery = sf.TrainingRecovery()
    found = recovery_decisions(recovery, [HEALTHY, {"jumped_after": 980}, *[SETBACK] * 2])
    assert [each.action for each in found] == ["none", "roll_back", "none", "none"]
    assert found[1].before == 980
    assert not found[1].only_if_moved


def test_a_return_that_was_declined_costs_nothing_and_the_next_needs_more_patience():
    recovery, state = sf.TrainingRecovery(), sf.TrainingRecovery().init()
    due = []
    for step in range(60):
        state, decision = recovery.update(state, step, setback=True)
        if decision.action == "roll_back":
            due.append(step)
            state = recovery.decline(state)
            assert recovery.update(state, step + 1)[1].lr_factor == 1.0
    assert due == [9, 49]


def test_refusals_without_end_lead_back_although_the_weights_have_not_moved():
    recovery, state = sf.TrainingRecovery(), sf.TrainingRecovery().init()
    sure = []
    for step in range(30):
        state, decision = recovery.update(state, step, refused=True)
        if decision.action == "roll_back":
            sure.append(not decision.only_if_moved)
            if decision.only_if_moved:
                state = recovery.decline(state)
    assert sure[:2] == [False, True]


def test_three_healthy_steps_settle_a_return_that_high_losses_led_to_and_one_does_not():
    recovery = sf.TrainingRecovery()
    assert recovery_actions(recovery, [SETBACK] * 10 + [HEALTHY] * 3 + [SETBACK] * 9) == {9: "roll_back"}
    once = [SETBACK] * 10 + [HEALTHY] + [SETBACK] * 3
    assert recovery_actions(recovery, once) == {9: "roll_back", 13: "take_back"}


def test_one_healthy_step_settles_a_return_that_refusals_led_to():
    assert recovery_actions(sf.TrainingRecovery(), [REFUSED] * 5 + [HEALTHY] + [REFUSED] * 4) == {4: "roll_back"}


NOISY = [SETBACK, SETBACK, HEALTHY] * 5
"""Single rows: even with a wrong model, a third of the losses is low."""


def test_where_a_third_of_the_losses_was_low_some_low_ones_after_a_return_prove_nothing():
    after = [HEALTHY, HEALTHY, SETBACK, HEALTHY, HEALTHY, HEALTHY, SETBACK, HEALTHY, SETBACK]
    assert recovery_actions(sf.TrainingRecovery(), NOISY[:14] + after) == {13: "roll_back", 22: "take_back"}


def test_more_low_losses_than_chance_explains_confirm_such_a_return():
    assert recovery_actions(sf.TrainingRecovery(), NOISY[:14] + [HEALTHY] * 6 + [SETBACK] * 9) == {13: "roll_back"}


def test_low_losses_before_a_confirmed_return_do_not_count_for_the_next_one():
    stream = NOISY[:14] + [HEALTHY] * 6 + [SETBACK] * 10 + [HEALTHY] * 3 + [SETBACK] * 3
    assert recovery_actions(sf.TrainingRecovery(), stream) == {13: "roll_back", 29: "roll_back"}


def test_cuts_compound_over_attempts_and_the_attempts_end():
    bad = [SETBACK] * 10 + [HEALTHY] * 3
    found = recovery_decisions(sf.TrainingRecovery(attempts=3, lr_factor=0.5), bad * 4)
    returns = [d for d in found if d.action != "none"]
    assert [d.action for d in returns] == ["roll_back"] * 3
    assert [d.lr_factor for d in returns] == [0.5, 0.25, 0.125]


def test_a_loss_that_is_high_and_finite_never_halts_a_run():
    recovery = sf.TrainingRecovery(attempts=2)
    for unhealthy in (SETBACK, LOST):
        for between in ([], [HEALTHY], [HEALTHY] * 7, [HEALTHY] * 30):
            assert "halt" not in recovery_actions(recovery, ([unhealthy] * 10 + between) * 30).values()


def test_when_the_returns_are_used_up_the_state_says_so():
    recovery, state = sf.TrainingRecovery(attempts=1), sf.TrainingRecovery().init()
    exhausted = []
    for i, facts in enumerate(([SETBACK] * 10 + [HEALTHY] * 3) * 2):
        state, _ = recovery.update(state, i, **facts)
        exhausted.append(recovery.is_exhausted(state))
    assert exhausted[:22] == [False] * 22
    assert exhausted[22]


def test_mean_losses_that_stay_high_lead_back():
    found = recovery_decisions(sf.TrainingRecovery(), [LOST] * 10)
    assert [d.action for d in found] == ["none"] * 9 + ["roll_back"]
    assert found[-1].before < recovery_decisions(sf.TrainingRecovery(), [SETBACK] * 10)[-1].before
    assert found[-1].only_if_moved


def test_a_return_that_mean_losses_led_to_is_taken_back_if_they_rise_again():
    """The mean needs some steps to show that the data have changed."""
    assert recovery_actions(sf.TrainingRecovery(), [LOST] * 10 + [HEALTHY] * 5 + [LOST] * 3) == {
        9: "roll_back",
        17: "take_back",
    }


def test_a_return_that_mean_losses_led_to_is_settled_after_a_dozen_healthy_steps():
    stream = [LOST] * 10 + [HEALTHY] * 12 + [LOST] * 9
    assert recovery_actions(sf.TrainingRecovery(), stream) == {9: "roll_back"}


def test_where_single_losses_led_to_a_return_three_healthy_steps_settle_it_whatever_the_means_say():
    both = {"setback": True, "lost": True}
    assert recovery_actions(sf.TrainingRecovery(), [both] * 10 + [HEALTHY] * 3 + [both] * 9) == {9: "roll_back"}


def test_cuts_are_lifted_one_by_one_while_the_run_stays_healthy():
    recovery = sf.TrainingRecovery(cut_steps=6)
    found = recovery_decisions(recovery, ([SETBACK] * 10 + [HEALTHY] * 3) * 2 + [HEALTHY] * 9)
    assert [d.lr_factor for d in found[-12:]] == [0.25] * 5 + [0.5] * 6 + [1.0]


def test_trouble_that_returns_with_the_rate_is_met_with_a_deeper_cut():
    recovery = sf.TrainingRecovery(cut_steps=5, calm_steps=100)
    found = recovery_decisions(recovery, ([SETBACK] * 10 + [HEALTHY] * 20) * 3)
    assert [d.lr_factor for d in found if d.action == "roll_back"] == [0.5, 0.25, 0.125]


def test_a_calm_stretch_refills_the_attempts():
    bad = [SETBACK] * 10 + [HEALTHY] * 20
    found = recovery_actions(sf.TrainingRecovery(attempts=1, calm_steps=20), bad * 6)
    assert set(found.values()) == {"roll_back"}
    assert len(found) == 6


def test_refused_steps_without_attempts_are_left_to_skipping_and_broken_weights_halt():
    assert recovery_actions(sf.TrainingRecovery(attempts=0), [REFUSED] * 20) == {}
    assert recovery_actions(sf.TrainingRecovery(attempts=0), [BROKEN]) == {0: "halt"}


def test_moments_can_be_reset_first():
    recovery = sf.TrainingRecovery(first="reset_moments")
    assert recovery_actions(recovery, [REFUSED] * 8) == {4: "reset_moments", 7: "roll_back"}
    assert recovery_actions(recovery, [BROKEN]) == {0: "roll_back"}


def test_a_return_is_taken_back_only_if_there_was_one():
    recovery = sf.TrainingRecovery(first="reset_moments")
    assert "take_back" not in recovery_actions(recovery, [SETBACK] * 13).values()


@given(st.lists(st.sampled_from([HEALTHY, REFUSED, SETBACK, BROKEN]), max_size=80))
def test_the_attempts_bound_the_returns_and_the_cut(stream):
    recovery = sf.TrainingRecovery(attempts=2, cut_steps=10_000, calm_steps=10_000)
    found = recovery_decisions(recovery, stream)
    kept = 0
    for decision in found:
        kept += (decision.action == "roll_back") - (decision.action == "take_back")
        assert 0 <= kept <= 2
        assert decision.lr_factor == 0.5**kept


@pytest.mark.parametrize(
    "wrong",
    [{"every_steps": 0}, {"keep": 0}, {"attempts": -1}, {"lr_factor": 0.0}, {"lr_factor": 2.0}, {"first": "pray"}],
)
def test_settings_that_cannot_work_are_refused(wrong):
    with pytest.raises(sf.SettingError, match=next(iter(wrong))):
        sf.TrainingRecovery(**wrong)


# ---- a series of bad batches ----------------------------------------------------------------------------------------

USUAL = [0.4 + 0.1 * (step % 3) for step in range(50)]


@pytest.mark.parametrize(
    ("losses", "ends"),
    [
        ([12, 11, 9, 8, 7, 1.0, 1.4, 1.6, 1.7], True),
        ([12, 11, 9, 1.6, 1.5, 1.5, 1.4], True),
        ([12, 6, 3, 1.5, 0.9, 0.7, 0.6], False),  # other data that is learned quickly
        ([12, 11, 10, 9, 8.5, 8, 7.7, 7.5], False),  # … or slowly
        ([12, 11, 9, 5, 5, 5, 5], False),  # it has hardly fallen
        ([12, 11, 9, 0.5, 0.4, 0.5, 0.5], False),  # the weights are as before
        ([12, 1.5, 1.5, 1.5, 1.5], False),  # a single step
    ],
)
def test_a_series_of_bad_batches_ends_when_the_loss_falls_at_once_and_stays_high(losses, ends):
    records = [StepRecord(Signals(step, loss=loss), False) for step, loss in enumerate([*USUAL, *losses])]
    assert burst_end(records, 50, bool) == (len(records) - 5 if ends else None)


def test_several_high_losses_in_a_row_occur_by_chance_where_losses_vary_a_hundredfold():
    usual = [0.01, 0.02, 0.04, 0.3, 45.0, 700.0, 0.01, 0.02, 0.03, 0.7] * 5
    losses = [*usual, 106.0, 55.0, 98.0, 88.0, 0.1, 6.0, 0.04, 9.2]
    records = [StepRecord(Signals(step, loss=loss), False) for step, loss in enumerate(losses)]
    assert burst_end(records, 50, bool) is None


@pytest.mark.parametrize(
    ("losses", "is_bad_batch"),
    [
        ([900, 8, 12, 9, 40, 70, 11, 9, 12, 8], True),
        ([900, 8, 12, 9, 500, 70, 11, 9, 12, 8], False),  # not alone
        ([12, 11, 13, 10, 12, 11, 9, 10, 11, 10], False),  # other data
        ([12, 5, 4, 3, 2.2, 1.6, 1.2, 1.0, 0.9, 0.8], False),  # … that is learned quickly
        ([900, 0.5, 0.4, 0.5, 0.5, 0.4, 0.5, 0.6, 0.5, 0.4], False),  # no harm was done
    ],
)
def test_a_bad_batch_is_one_whose_loss_is_far_above_those_after_it(losses, is_bad_batch):
    records = [StepRecord(Signals(step, loss=loss), False) for step, loss in enumerate([*USUAL, *losses])]
    assert was_bad_batch(records, 50) is is_bad_batch
    assert not was_bad_batch(records, None)
