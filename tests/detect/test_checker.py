from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import surefoot as sf
from streams import INF, NAN, alarms, flags, judge, losses, norms, steps
from surefoot import Signals

CHECKER = sf.StabilityChecker(
    explosion=sf.Explosion(min_steps=5),
    spike=sf.Spike(window_steps=16, min_steps=6),
    loss=sf.LossStabilityMonitor(16),
    oscillation=sf.Oscillation(16),
    plateau=sf.Plateau(16),
    no_learning=sf.NoLearning(32, 16),
    clipping=sf.ClippingSaturated(16),
)


def healthy(count, seed=0):
    noise = np.random.default_rng(seed).uniform(0.9, 1.1, size=(2, count))
    return steps(loss=(5 * np.exp(-np.arange(count) / 100) * noise[0]).tolist(), grad_norm=noise[1].tolist())


def test_every_monitor_has_its_say_and_its_name():
    _, verdict = CHECKER.update(CHECKER.init(), Signals(0, loss=1.0, grad_norm=1.0))
    assert [part.detector for part in verdict.parts] == [
        "nonfinite",
        "explosion",
        "spike",
        "loss_stability",
        "vanishing",
        "oscillation",
        "plateau",
        "no_learning",
        "clipping_saturated",
    ]
    assert verdict.detector == "stability"


@given(st.integers(0, 2**16))
def test_a_healthy_run_is_healthy(seed):
    assert not alarms(CHECKER, healthy(60, seed))


def test_remarks_alone_leave_the_run_healthy():
    verdict = judge(CHECKER, steps(loss=[1.0] * 48, grad_norm=[1.0] * 48, clip_factor=[0.5] * 48))[1][-1]
    remarks = {part.detector for part in verdict.parts if part.anomalous}
    assert {"plateau", "clipping_saturated"} <= remarks
    assert not verdict.anomalous


@pytest.mark.parametrize(
    ("signals", "raised", "severity"),
    [
        ({"loss": NAN, "grad_norm": 1.0}, "nonfinite", "error"),
        ({"loss": 1.0, "grad_norm": INF, "nonfinite": 0.0}, "explosion", "error"),
        ({"loss": 1e6, "grad_norm": 40.0}, "spike", "warning"),
    ],
)
def test_trouble_is_named_with_its_severity(signals, raised, severity):
    state, _ = judge(CHECKER, healthy(40))
    _, verdict = CHECKER.update(state, Signals(40, **signals))
    assert verdict.anomalous is True
    assert verdict.severity == severity
    assert [part.detector for part in verdict.parts if part.anomalous] == [raised]
    assert verdict.summary == raised


def test_a_nan_now_and_a_healthy_verdict_next():
    stream = healthy(40)
    stream[20] = replace(stream[20], loss=NAN, grad_norm=NAN)
    assert flags(CHECKER, stream) == [i == 20 for i in range(40)]


LIMITS = {"max_grad_norm": 10.0, "max_grad_ratio": 0.5, "max_loss": 3.0}
APART = {"setback", "lost_progress", *LIMITS}  # the first two are for the recovery; limits are numbers, and off
MONITORS = [each.name for each in fields(sf.StabilityChecker) if each.name not in APART]


@pytest.mark.parametrize("name", MONITORS)
def test_every_monitor_can_be_left_out(name):
    checker = replace(CHECKER, **{name: None})
    _, verdict = checker.update(checker.init(), Signals(0, loss=NAN, grad_norm=1.0))
    assert len(verdict.parts) == 8
    assert verdict.anomalous == (name != "nonfinite")


def test_with_every_monitor_left_out_there_is_nothing_to_say():
    checker = sf.StabilityChecker(**dict.fromkeys([each.name for each in fields(sf.StabilityChecker)]))
    _, verdict = checker.update(checker.init(), Signals(0, loss=NAN))
    assert not verdict.anomalous


def test_step_rules_and_look_back_are_all_there_is():
    assert [type(rule) for rule in CHECKER.step_rules] == [sf.NonFinite, sf.Explosion, sf.Spike]
    assert len(CHECKER.step_rules + CHECKER.look_back) == len(MONITORS)


def test_thresholds_are_fields_with_documented_defaults():
    checker = sf.StabilityChecker(spike=sf.Spike(threshold=4.0))
    assert checker.spike.threshold == 4.0
    assert sf.StabilityChecker().spike == sf.Spike()


@pytest.mark.parametrize("kind", [float, torch.tensor], ids=["host", "device"])
@pytest.mark.parametrize(
    ("name", "inside", "beyond"),
    [
        ("max_grad_norm", {"grad_norm": 10.0}, {"grad_norm": 10.5}),
        ("max_grad_ratio", {"grad_norm": 2.0, "param_norm": 4.0}, {"grad_norm": 2.5, "param_norm": 4.0}),
        ("max_loss", {"loss": 3.0}, {"loss": 3.5}),
        ("max_loss", {"loss": -50.0}, {"loss": INF}),
    ],
)
def test_a_limit_refuses_the_very_first_step_beyond_it(name, inside, beyond, kind):
    off = dict.fromkeys([each.name for each in fields(sf.StabilityChecker)])
    checker = sf.StabilityChecker(**off | {name: LIMITS[name]})
    for values, expected in ((inside, False), (beyond, True), (inside, False), (dict.fromkeys(beyond, NAN), False)):
        signals = Signals(0, **{each: kind(value) for each, value in values.items()})
        _, verdict = checker.update(checker.init(), signals)
        assert [(part.detector, bool(part.anomalous)) for part in verdict.parts] == [
            (f"limit.{name.removeprefix('max_')}", expected)
        ]


def test_what_was_not_measured_is_within_every_limit():
    checker = sf.StabilityChecker(**LIMITS)
    for signals in (Signals(0), Signals(0, grad_norm=5.0, param_norm=0.0), Signals(0, grad_norm=5.0)):
        assert not checker.update(checker.init(), signals)[1].anomalous


def test_limits_are_off_by_default_and_only_those_that_are_set_are_shown():
    assert repr(sf.StabilityChecker()).endswith(f", setback={sf.Setback()!r}, lost_progress={sf.LostProgress()!r})")
    assert repr(sf.StabilityChecker(max_loss=3.0)).endswith(", max_loss=3.0)")
    assert len(sf.StabilityChecker(**LIMITS).step_rules) == len(CHECKER.step_rules) + 3


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("wrong", [NAN, INF, "10", 0.0, -1.0])
def test_a_limit_that_is_no_number_is_refused_at_construction(name, wrong):
    with pytest.raises(sf.SettingError, match=f"`{name}` must be a positive finite number, or None"):
        sf.StabilityChecker(**{name: wrong})


@pytest.mark.parametrize("wrong", [sf.Spike, "spike", 3.0])
def test_a_monitor_that_is_no_detector_is_refused_at_construction(wrong):
    with pytest.raises(sf.SettingError, match="`spike` takes a detector"):
        sf.StabilityChecker(spike=wrong)


@given(st.lists(st.tuples(losses, norms), min_size=20, max_size=40))
def test_floats_and_tensors_give_the_same_verdicts(stream):
    floats = [Signals(i, loss, norm) for i, (loss, norm) in enumerate(stream)]
    tensors = [Signals(i, torch.tensor(loss), torch.tensor(norm)) for i, (loss, norm) in enumerate(stream)]
    assert flags(CHECKER, tensors) == flags(CHECKER, floats)
