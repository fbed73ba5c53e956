import pytest
from hypothesis import given
from hypothesis import strategies as st

import surefoot as sf
from surefoot.decide.escalation import EscalationState

settings = st.builds(
    sf.Escalation,
    skips=st.integers(0, 4),
    cuts=st.integers(0, 3),
    lr_factor=st.sampled_from([0.25, 0.5, 1.0]),
    calm_steps=st.integers(1, 6),
)
anomalies = st.lists(st.booleans(), min_size=10, max_size=60)


def decisions(escalation, stream, state=None):
    state, found = state or escalation.init(), []
    for anomalous in stream:
        state, decision = escalation.update(state, anomalous, "because")
        found.append(decision)
    return state, found


def actions(escalation, stream):
    return [decision.action for decision in decisions(escalation, stream)[1]]


def test_skip_then_back_off_then_halt():
    escalation = sf.Escalation(skips=2, cuts=2)
    assert actions(escalation, [True] * 9) == ["skip", "skip", "back_off"] * 2 + ["skip", "skip", "halt"]


def test_cuts_compound():
    escalation = sf.Escalation(skips=0, cuts=3, lr_factor=0.5)
    assert [decision.lr_factor for decision in decisions(escalation, [True] * 3)[1]] == [0.5, 0.25, 0.125]


def test_a_cut_stands_on_the_healthy_steps_that_follow():
    escalation = sf.Escalation(skips=0, cuts=3, calm_steps=4)
    found = decisions(escalation, [True, False, False, False, False, False])[1]
    assert [decision.lr_factor for decision in found] == [0.5, 0.5, 0.5, 0.5, 1.0, 1.0]


def test_calm_refills_the_skips_and_takes_one_cut_back():
    escalation = sf.Escalation(skips=1, cuts=5, calm_steps=3)
    state, _ = decisions(escalation, [True] * 5)
    assert (state.skips, state.cuts) == (1, 2)
    state, _ = decisions(escalation, [False] * 3, state)
    assert state == EscalationState(skips=0, cuts=1, calm=0)
    state, _ = decisions(escalation, [False] * 3, state)
    assert state.cuts == 0


def test_calm_must_be_unbroken():
    escalation = sf.Escalation(skips=2, cuts=0, calm_steps=3)
    assert actions(escalation, [True, False, False, True, False, False, True])[-1] == "halt"
    assert actions(escalation, [True, False, False, False, True, False, False, True])[-1] == "skip"


def test_a_healthy_step_asks_for_nothing_and_gives_no_reason():
    _, (decision,) = decisions(sf.Escalation(), [False])
    assert decision == sf.types.Decision("none", "", 1.0)


def test_a_decision_carries_the_reason_it_was_given():
    assert decisions(sf.Escalation(), [True])[1][0].reason == "because"


def test_once_halted_it_stays_halted_while_trouble_lasts():
    assert actions(sf.Escalation(skips=0, cuts=0), [True] * 5) == ["halt"] * 5


@given(settings, anomalies)
def test_the_learning_rate_is_only_ever_cut_and_never_beyond_its_budget(escalation, stream):
    for decision in decisions(escalation, stream)[1]:
        assert escalation.lr_factor**escalation.cuts <= decision.lr_factor <= 1.0


@given(settings, anomalies)
def test_healthy_steps_are_never_acted_upon_and_anomalous_ones_always_are(escalation, stream):
    for anomalous, action in zip(stream, actions(escalation, stream), strict=True):
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
    assert actions(escalation, [True] * (allowed + 1)).index("halt") == allowed


def test_a_cut_that_would_raise_the_learning_rate_is_refused():
    with pytest.raises(sf.SettingError, match=r"`lr_factor` must lie in \(0, 1\]; got 2.0. A cut never raises the LR"):
        sf.Escalation(lr_factor=2.0)
