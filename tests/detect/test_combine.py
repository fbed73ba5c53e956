import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import surefoot as sf
from streams import NAN, alarms, flags, judge, loss_streams, norms, ordinary, steps
from surefoot import Signals

EXPLODES = sf.Explosion(factor=10.0, min_steps=3, patience=3)
SPIKES = sf.Spike(("loss",), window_steps=8, min_steps=4, patience=3)
BREAKS = sf.NonFinite()
rows = st.lists(st.tuples(st.one_of(ordinary, st.sampled_from([NAN, 1e6])), norms), min_size=10, max_size=40)


def signals(stream):
    return steps(loss=[loss for loss, _ in stream], grad_norm=[norm for _, norm in stream])


@given(rows)
def test_any_of_is_anomalous_when_one_part_is(stream):
    each = [flags(part, signals(stream)) for part in (EXPLODES, SPIKES, BREAKS)]
    assert flags(sf.any_of(EXPLODES, SPIKES, BREAKS), signals(stream)) == [
        any(step) for step in zip(*each, strict=True)
    ]


@given(rows)
def test_all_of_is_anomalous_when_every_part_is_at_the_same_step(stream):
    each = [flags(part, signals(stream)) for part in (EXPLODES, SPIKES)]
    assert flags(sf.all_of(EXPLODES, SPIKES), signals(stream)) == [all(step) for step in zip(*each, strict=True)]


@given(rows, st.integers(1, 4))
def test_sustained_needs_its_steps_in_a_row(stream, count):
    run, expected = 0, []
    for anomalous in flags(EXPLODES, signals(stream)):
        run = run + 1 if anomalous else 0
        expected.append(run >= count)
    assert flags(sf.sustained(EXPLODES, count), signals(stream)) == expected


@given(rows, st.integers(0, 30))
def test_after_warmup_is_silent_and_then_the_detector_itself(stream, count):
    expected = [anomalous and i >= count for i, anomalous in enumerate(flags(BREAKS, signals(stream)))]
    assert flags(sf.after_warmup(BREAKS, count), signals(stream)) == expected


@given(rows)
def test_what_is_silent_still_learns(stream):
    own, _ = judge(EXPLODES, signals(stream))
    wrapped, _ = judge(sf.after_warmup(EXPLODES, 10**6), signals(stream))
    assert wrapped == own


@given(rows)
def test_combinations_of_combinations_give_the_same_verdict_for_floats_and_tensors(stream):
    rule = sf.any_of(BREAKS, sf.all_of(EXPLODES, sf.after_warmup(SPIKES, 6)), sf.sustained(EXPLODES, 2))
    tensors = [Signals(s.step, torch.tensor(s.loss), torch.tensor(s.grad_norm)) for s in signals(stream)]
    assert flags(rule, tensors) == flags(rule, signals(stream))


@given(loss_streams(30, 60))
def test_detectors_that_look_back_combine_for_floats_and_tensors_alike(stream):
    rule = sf.sustained(sf.any_of(sf.Plateau(8), sf.LossStabilityMonitor(8, every_steps=2)), 2)
    found = flags(rule, steps(loss=stream))
    assert flags(rule, steps(loss=[torch.tensor(loss, dtype=torch.float64) for loss in stream])) == found


def test_each_part_keeps_its_own_baseline_whatever_the_others_say():
    rule = sf.any_of(BREAKS, EXPLODES)
    state, _ = judge(rule, steps(loss=[1.0] * 5, grad_norm=[1.0] * 5))
    state, verdict = rule.update(state, Signals(5, loss=NAN, grad_norm=2.0))
    assert verdict.anomalous
    assert state[1].peak == 2.0


def test_a_combined_verdict_is_taken_apart_into_its_parts():
    rule = sf.any_of(BREAKS, sf.all_of(EXPLODES, SPIKES))
    _, verdict = rule.update(rule.init(), Signals(0, loss=NAN, grad_norm=1.0))
    assert verdict.detector == "any_of"
    assert [part.detector for part in verdict.parts] == ["nonfinite", "all_of"]
    assert [leaf.detector for leaf in verdict.leaves()] == ["nonfinite", "explosion", "spike"]
    assert [bool(leaf.anomalous) for leaf in verdict.leaves()] == [True, False, False]


def test_summaries_of_the_parts_are_joined():
    rule = sf.any_of(sf.Plateau(8), sf.ClippingSaturated(8))
    verdict = judge(rule, steps(loss=[1.0] * 8, clip_factor=[0.5] * 8))[1][-1]
    assert verdict.anomalous
    assert "loss gained 0" in verdict.summary
    assert "8 of the last 8 steps were clipped" in verdict.summary


def test_a_detector_held_back_has_nothing_to_say_yet():
    stream = steps(clip_factor=[0.5] * 12)
    for rule, silent in (
        (sf.sustained(sf.ClippingSaturated(8), 3), 9),
        (sf.after_warmup(sf.ClippingSaturated(8), 9), 9),
    ):
        verdicts = judge(rule, stream)[1]
        assert [bool(verdict.summary) for verdict in verdicts] == [False] * silent + [True] * (12 - silent)
        assert [bool(verdict.anomalous) for verdict in verdicts] == [False] * silent + [True] * (12 - silent)


@given(st.floats(-1e6, 1e6), st.integers(1, 40))
def test_a_constant_stream_never_alarms(value, count):
    rule = sf.any_of(BREAKS, EXPLODES, SPIKES, sf.sustained(sf.Oscillation(16), 2))
    assert not alarms(rule, steps(loss=[value] * count, grad_norm=[abs(value)] * count))


@pytest.mark.parametrize("combine", [sf.any_of, sf.all_of])
def test_nothing_to_combine_is_refused(combine):
    with pytest.raises(sf.SettingError, match="needs at least one detector; got none"):
        combine()


@pytest.mark.parametrize(
    "make",
    [
        lambda: sf.any_of(sf.NonFinite(), "spike"),
        lambda: sf.all_of(sf.NonFinite(), sf.Spike),
        lambda: sf.sustained("spike", 2),
        lambda: sf.sustained(sf.Spike, 2),
        lambda: sf.after_warmup("spike", 2),
    ],
)
def test_what_is_no_detector_is_refused_at_construction_and_named(make):
    with pytest.raises(sf.SettingError, match=r"takes a detector .*got .*[sS]pike"):
        make()
