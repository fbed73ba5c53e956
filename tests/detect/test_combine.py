"""Detectors made of detectors, and detectors of the user's own, which may fail without ending the training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import surefoot as sf
from loops import differences, everything
from streams import NAN, alarms, flags, judge, loss_streams, norms, ordinary, steps
from surefoot import Signals
from surefoot.detect.combine import tolerated

# ---- any_of, all_of, sustained, after_warmup ------------------------------------------------------------------------


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


# ---- detectors of the user's own ------------------------------------------------------------------------------------


SLOTS = ("nonfinite", "spike", "plateau", "setback")


class TooHigh:
    """Takes for granted that there is a loss, as a training has one."""

    def init(self) -> float:
        return 0.0

    def update(self, state: float, signals: sf.Signals) -> tuple[float, sf.Verdict]:
        return state + 1, sf.Verdict("too-high", signals.loss > 100.0)


@dataclass(frozen=True)
class Failing:
    """Fails at one step, in one of many ways."""

    at: int
    how: str

    def init(self) -> None:
        return None

    def update(self, state: None, signals: sf.Signals) -> Any:
        if signals.step != self.at:
            return state, sf.Verdict("failing", False)
        if self.how == "raises":
            raise KeyError("something of mine")
        return {
            "says nothing": None,
            "says a bool": (state, True),
            "has no verdict": (state, sf.Verdict("failing", None, "dreadful")),  # type: ignore[arg-type]
            "has many verdicts": (state, sf.Verdict("failing", torch.zeros(3))),
        }[self.how]


def built(decide_on: str = "host", **settings: Any) -> tuple[nn.Module, Any, sf.TrainingStabilizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    return model, optimizer, sf.TrainingStabilizer(model, optimizer, decide_on=decide_on, **settings)  # type: ignore[arg-type]


def train(model: nn.Module, stabilizer: sf.TrainingStabilizer, steps: int = 12, bad: int = -1) -> list[bool]:
    applied = []
    for step in range(steps):
        x = torch.randn(8, 4)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean() * (NAN if step == bad else 1.0)
        stabilizer.backward(loss)
        applied.append(stabilizer.step().applied)
    return applied


def bare() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    for _ in range(12):
        x = torch.randn(8, 4)
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
    return everything(model, optimizer)


@pytest.mark.parametrize("decide_on", ["host", "device"])
@pytest.mark.parametrize("slot", SLOTS)
def test_a_detector_is_not_asked_about_a_step_that_never_was(
    slot: str, decide_on: str, caplog: pytest.LogCaptureFixture
) -> None:
    checker = sf.StabilityChecker(**{slot: TooHigh()})
    model, optimizer, stabilizer = built(decide_on, checker=checker, recovery=sf.TrainingRecovery())
    train(model, stabilizer)
    assert differences(everything(model, optimizer), bare()) == []
    assert caplog.text == ""


@pytest.mark.parametrize("decide_on", ["host", "device"])
def test_a_step_is_refused_under_the_name_that_the_verdict_gives(decide_on: str) -> None:
    model, _, stabilizer = built(decide_on, checker=sf.StabilityChecker(spike=TooHigh()))
    stabilizer.backward(model(torch.randn(8, 4)).square().mean() * 0 + 1e3)
    assert stabilizer.step().reasons == ("too-high",)


@pytest.mark.parametrize("decide_on", ["host", "device"])
@pytest.mark.parametrize("slot", SLOTS)
@pytest.mark.parametrize("how", ["raises", "says nothing", "says a bool", "has no verdict", "has many verdicts"])
def test_a_detector_that_fails_is_left_out_with_one_warning(
    how: str, slot: str, decide_on: str, caplog: pytest.LogCaptureFixture
) -> None:
    checker = sf.StabilityChecker(**{slot: Failing(5, how)})
    model, optimizer, stabilizer = built(decide_on, checker=checker, recovery=sf.TrainingRecovery())
    train(model, stabilizer)
    assert differences(everything(model, optimizer), bare()) == []
    [warning] = caplog.records
    assert f"step 5: the detector Failing(at=5, how={how!r}) failed and is disabled" in warning.getMessage()


@pytest.mark.parametrize("decide_on", ["host", "device"])
def test_what_stands_beside_it_continues_protecting_the_weights(decide_on: str) -> None:
    both = sf.any_of(sf.NonFinite(), sf.after_warmup(sf.sustained(Failing(2, "raises"), 1), 0))
    checker = sf.StabilityChecker(nonfinite=both, spike=None, explosion=None)
    model, _, stabilizer = built(decide_on, checker=checker)
    assert train(model, stabilizer, bad=7) == [step != 7 for step in range(12)]


def test_ours_are_not_wrapped() -> None:
    """A CUDA graph is recorded of ours alone, and one of ours that fails is a bug to be heard of."""
    rule = sf.any_of(sf.NonFinite(), sf.sustained(sf.Spike(), 2))
    assert tolerated(rule) == rule
    assert repr(tolerated(sf.any_of(Failing(1, "raises")))) == repr(sf.any_of(Failing(1, "raises")))


def test_states_of_any_kind_are_saved_and_loaded_as_what_they_were() -> None:
    class Keeps:
        def __init__(self, fresh: Any) -> None:
            self.fresh = fresh

        def init(self) -> Any:
            return self.fresh

        def update(self, state: Any, signals: sf.Signals) -> tuple[Any, sf.Verdict]:
            seen.append(state)
            if isinstance(state, list):
                return [*state, 1.0], sf.Verdict("keeps", False)
            if isinstance(state, dict):
                return {"count": state["count"] + 1}, sf.Verdict("keeps", False)
            return state, sf.Verdict("keeps", False)

    for fresh in ([], {"count": torch.zeros(())}, None, 3.0, "text"):
        seen: list[Any] = []
        checker = sf.StabilityChecker(plateau=Keeps(fresh))
        model, _, stabilizer = built(checker=checker)
        train(model, stabilizer, steps=3)
        _, _, again = built(checker=checker)
        again.load_state_dict(stabilizer.state_dict())
        last = seen[-1]
        train(model, again, steps=1)
        assert type(seen[-1]) is type(fresh)
        if isinstance(fresh, list):
            assert len(seen[-1]) == len(last) + 1
        if isinstance(fresh, dict):
            assert seen[-1]["count"] == 3


def test_a_detector_that_prints_with_its_address_continues_in_another_process() -> None:
    """Two objects of one class stand for the two processes."""
    first, second = (sf.StabilityChecker(plateau=TooHigh()) for _ in range(2))
    model, _, stabilizer = built(checker=first)
    train(model, stabilizer, steps=3)
    _, _, again = built(checker=second)
    again.load_state_dict(stabilizer.state_dict())
    state = again.state_dict()["results"]["history"]["look_back"]
    assert 3.0 in state
