"""A setting of the optimizer that is not finite never reaches the weights, and is named."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import surefoot as sf
from loops import SignDescent, differences, everything

if TYPE_CHECKING:
    from pathlib import Path

NAN, INF = float("nan"), float("inf")
REASON = "nonfinite-setting"

OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "fused adamw": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "fused sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, fused=True),
    "third-party style": SignDescent,
}
CASES: list[tuple[str, str, Any, str]] = [
    *((name, "lr", value, f"lr of parameter group 0 is {value}") for name in OPTIMIZERS for value in (NAN, INF)),
    *((name, "lr", torch.tensor(NAN), "lr of parameter group 0 is nan") for name in ("adamw", "fused adamw", "sgd")),
    *((name, "weight_decay", NAN, "weight_decay of parameter group 0 is nan") for name in ("adamw", "fused sgd")),
    ("fused adamw", "betas", (0.9, NAN), "betas[1] of parameter group 0 is nan"),
    ("adamw", "eps", NAN, "eps of parameter group 0 is nan"),
    ("fused sgd", "momentum", -INF, "momentum of parameter group 0 is -inf"),
]


def built(optimizer: str, **settings: Any) -> tuple[nn.Module, Any, sf.TrainingStabilizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    made = OPTIMIZERS[optimizer](model.parameters())
    return model, made, sf.TrainingStabilizer(model, made, **settings)


def step(model: nn.Module, stabilizer: sf.TrainingStabilizer) -> sf.Outcome:
    x = torch.randn(8, 4)
    stabilizer.backward((model(x) - x.sum(1, keepdim=True)).square().mean())
    return stabilizer.step()


def train(model: nn.Module, stabilizer: sf.TrainingStabilizer, steps: int) -> None:
    for _ in range(steps):
        step(model, stabilizer)


@pytest.mark.parametrize("decide_on", ["host", "device"])
@pytest.mark.parametrize(("optimizer", "key", "value", "said"), CASES, ids=[f"{c[0]}-{c[3]}" for c in CASES])
def test_the_step_is_refused_and_the_setting_is_named(
    optimizer: str, key: str, value: Any, said: str, decide_on: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, made, stabilizer = built(optimizer, decide_on=decide_on)
    for _ in range(3):
        assert step(model, stabilizer).applied
    before, group = everything(model, made), made.param_groups[0]
    good, group[key] = group[key], value
    outcome = step(model, stabilizer)
    group[key] = good
    assert outcome.skipped
    assert outcome.reasons == (REASON,)
    assert said in repr(outcome)
    assert differences(before, everything(model, made)) == []
    assert step(model, stabilizer).applied
    for _ in range(4):  # the incident is logged when its turn comes
        step(model, stabilizer)
    [incident] = stabilizer.incidents
    assert (incident.step, incident.kind, incident.severity) == (3, REASON, "error")
    assert said in incident.summary
    assert list(incident.evidence["settings"]) == [f"param_groups[0].{said.split()[0]}"]
    assert said in caplog.text
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_a_step_that_takes_a_closure_is_refused_too() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1)
    stabilizer, x = sf.TrainingStabilizer(model, optimizer), torch.randn(16, 4)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        stabilizer.backward(loss)
        return loss

    before = everything(model, optimizer)
    optimizer.param_groups[0]["lr"] = NAN
    assert stabilizer.step(closure).reasons == (REASON,)
    assert differences(before, everything(model, optimizer)) == []
    optimizer.param_groups[0]["lr"] = 0.1
    assert stabilizer.step(closure).applied


@pytest.mark.parametrize("decide_on", ["host", "device"])
def test_a_group_without_a_gradient_is_no_reason_and_another_is_named_by_its_number(decide_on: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW([{"params": part.parameters()} for part in model], lr=0.01, fused=True)
    stabilizer = sf.TrainingStabilizer(model, optimizer, decide_on=decide_on)
    model[0].requires_grad_(requires_grad=False)
    optimizer.param_groups[0]["lr"] = NAN
    assert step(model, stabilizer).applied
    optimizer.param_groups[1]["weight_decay"] = INF
    assert step(model, stabilizer).record.settings == ((1, "weight_decay", INF),)


def test_what_is_infinite_on_purpose_is_left_alone() -> None:
    """Prodigy sets `growth_rate` to infinity, and people keep notes of their own in the groups."""
    model, optimizer, stabilizer = built("adamw")
    optimizer.param_groups[0] |= {"growth_rate": INF, "best_loss": INF, "last_loss": NAN, "d": INF}
    assert all(step(model, stabilizer).applied for _ in range(3))
    adafactor = torch.optim.Adafactor(model.parameters())  # an epsilon of `None`, and no weight decay
    stabilizer = sf.TrainingStabilizer(model, adafactor)
    assert all(step(model, stabilizer).applied for _ in range(3))


@pytest.mark.parametrize("decide_on", ["host", "device"])
def test_a_schedule_that_breaks_halts_the_run_in_the_end_and_never_goes_back(decide_on: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: NAN if i >= 30 else 1.0)
    with sf.RunLog(tmp_path, device_seconds=None) as log:
        stabilizer = sf.TrainingStabilizer(
            model,
            optimizer,
            scheduler=schedule,
            recovery=sf.TrainingRecovery(every_steps=5),
            escalation=sf.Escalation(skips=8, cuts=1),
            decide_on=decide_on,
            log=log,
            incidents=tmp_path,
        )
        with pytest.raises(sf.TrainingHalted, match="lr of parameter group 0 is nan"):
            train(model, stabilizer, steps=80)
    assert {i.kind for i in stabilizer.incidents} == {REASON}
    assert stabilizer.counts["applied"] == 30
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    [first, *_] = [event for event in sf.load_run(tmp_path).events if event.cause == REASON]
    assert (first.step, first.event) == (30, "skip")
    assert [folder.name for folder in (tmp_path / "incidents").iterdir()] == ["000000030"]


def test_a_rule_does_not_learn_from_a_step_that_was_refused_for_a_setting() -> None:
    model, optimizer, stabilizer = built("adamw")
    step(model, stabilizer)
    before = stabilizer.state_dict()["policy"]["rules"]
    optimizer.param_groups[0]["lr"] = NAN
    step(model, stabilizer)
    after = stabilizer.state_dict()["policy"]["rules"]
    assert repr(before) == repr(after)
