"""Detectors of the user's own: anything with `init` and `update` will do, and one that fails does not end training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import surefoot as sf
from loops import differences, everything
from surefoot.detect.user_detectors import tolerated

NAN = float("nan")
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
    assert f"step 5: the detector Failing(at=5, how={how!r}) failed and is left out" in warning.getMessage()


@pytest.mark.parametrize("decide_on", ["host", "device"])
def test_what_stands_beside_it_goes_on_protecting_the_weights(decide_on: str) -> None:
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


def test_a_detector_that_prints_with_its_address_goes_on_in_another_process() -> None:
    """Two objects of one class stand for the two processes."""
    first, second = (sf.StabilityChecker(plateau=TooHigh()) for _ in range(2))
    model, _, stabilizer = built(checker=first)
    train(model, stabilizer, steps=3)
    _, _, again = built(checker=second)
    again.load_state_dict(stabilizer.state_dict())
    state = again.state_dict()["aftermath"]["ledger"]["look_back"]
    assert 3.0 in state
