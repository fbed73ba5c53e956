import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import surefoot as sf
from streams import INF, NAN, alarms, flags, judge, loss_streams, steps
from surefoot import Signals

RULE = sf.Plateau(window_steps=16)
NEVER = sf.NoLearning(after_steps=40, window_steps=10)


def losses(stream, first=0):
    return steps(first, loss=stream)


# ---- Plateau --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [-5.0, 0.0, 3.0])
def test_a_loss_that_no_longer_falls_is_a_plateau_at_any_level(level):
    falling = level + 100 - np.arange(40.0)
    found = flags(RULE, losses([*falling, *(falling[-1] + 0.01 * (-1.0) ** np.arange(64))]))
    assert not any(found[:40])
    assert found[-1]


@given(st.floats(0.01, 10.0), st.floats(-100, 100))
def test_a_loss_that_falls_is_on_no_plateau(slope, level):
    assert not any(flags(RULE, losses([level - slope * i for i in range(80)])))


@given(loss_streams())
def test_it_is_a_remark_and_never_an_alarm(stream):
    assert not alarms(RULE, losses(stream))


def test_the_remark_stands_until_the_next_judgement():
    found = flags(RULE, losses([1.0] * 60))
    start = found.index(True)
    assert start == 15
    assert all(found[start:])


def test_a_plateau_ends_when_the_loss_falls_again():
    found = flags(RULE, losses([*[1.0] * 32, *(1.0 - 0.1 * np.arange(32.0))]))
    assert found[31]
    assert not found[-1]


def test_a_plateau_is_one_incident_however_long_it_lasts():
    model = torch.nn.Linear(2, 1)
    checker = sf.StabilityChecker(plateau=RULE, no_learning=None)
    stabilizer = sf.TrainingStabilizer(model, torch.optim.SGD(model.parameters(), lr=0.0), checker=checker)
    for _ in range(100):
        stabilizer.backward(model(torch.ones(1, 2)).mean())
        stabilizer.step()
    assert [(incident.kind, incident.step) for incident in stabilizer.incidents] == [("plateau", 15)]


def test_the_evidence_is_the_gain_and_the_noise():
    verdict = judge(RULE, losses([1.0, 2.0] * 8))[1][-1]
    assert verdict.evidence["steps"] == 8
    assert verdict.evidence["gain"] == 0.0
    assert verdict.evidence["noise"] == pytest.approx(1 / (0.6745 * np.sqrt(2)))


@given(st.integers(0, 15), st.sampled_from([NAN, INF, -INF]))
def test_one_nan_does_not_poison_the_baseline(place, bad):
    stream = [1.0] * 40
    state, _ = judge(RULE, losses([*stream[:place], bad, *stream[place:]]))
    assert state.window == (1.0,) * 16


# ---- NoLearning -----------------------------------------------------------------------------------------------------


@given(st.integers(0, 100), st.sampled_from([-3.0, 0.0, 5.0]))
def test_a_loss_that_never_left_its_first_level_is_remarked_after_a_while(seed, level):
    stream = level + np.random.default_rng(seed).normal(size=10) * 1e-3
    stream = [*stream, *(float(np.median(stream)) for _ in range(60))]
    found = flags(NEVER, losses(stream))
    assert not any(found[:40])
    assert all(found[40:])


def test_a_loss_that_fell_once_has_learned_for_good():
    falling = list(5.0 - 0.1 * np.arange(30.0))
    assert not any(flags(NEVER, losses([*falling, *[5.0] * 100])))


def test_learning_later_takes_the_remark_back():
    found = flags(NEVER, losses([*[5.0] * 60, *[1.0] * 40]))
    assert found[59]
    assert not found[-1]


def test_after_steps_counts_real_steps():
    assert flags(NEVER, losses([5.0] * 31, first=10))[-1]
    assert not any(flags(NEVER, losses([5.0] * 31)))


@given(st.integers(0, 59), st.sampled_from([NAN, INF, -INF]))
def test_a_broken_loss_is_neither_progress_nor_a_level(place, bad):
    stream = [5.0] * 80
    stream[place] = bad
    state, verdicts = judge(NEVER, losses(stream))
    assert verdicts[-1].anomalous
    assert set(state.first) | set(state.last) == {5.0}


def test_a_loss_nobody_measured_is_no_verdict():
    assert not any(flags(NEVER, [Signals(i) for i in range(100)]))


@given(loss_streams())
def test_no_learning_is_a_remark_and_never_an_alarm(stream):
    assert not alarms(NEVER, losses(stream))
