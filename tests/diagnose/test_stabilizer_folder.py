"""`surefoot diagnose` on the folder of a stabilizer: what the steps prove is named, and nothing else is."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from typer.testing import CliRunner

import surefoot as sf
from surefoot.cli import app
from surefoot.diagnose.engine import diagnose, load
from surefoot.record.facts import STEPS_ONLY

if TYPE_CHECKING:
    from collections.abc import Callable, Container
    from pathlib import Path

    from surefoot.diagnose.findings import Diagnosis


def train(
    folder: Path,
    steps: int = 120,
    lr: float = 0.05,
    at: Callable[[int, torch.optim.Optimizer, torch.Tensor], torch.Tensor] | None = None,
    overflows: Container[int] = (),
    **settings: object,
) -> Diagnosis:
    """A small regression under a stabilizer; `at` may change the optimizer and the batch of a step.

    At the steps of `overflows` the loss is finite and its gradient is not, as in half precision.
    """
    torch.manual_seed(0)
    data = torch.randn(256, 8)
    goals = data[:, :1] + 0.5 * data[:, 1:2]
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    stabilizer = sf.TrainingStabilizer(model, optimizer, log=folder, **settings)  # type: ignore[arg-type]
    now = [0]
    model[0].weight.register_hook(lambda grad: grad * math.inf if now[0] in overflows else grad)
    for step in range(steps):
        now[0] = step
        rows = torch.randint(256, (32,))
        batch = data[rows]
        batch = at(step, optimizer, batch) if at is not None else batch
        with stabilizer.autocast():
            loss = F.mse_loss(model(batch), goals[rows])
        stabilizer.backward(loss)
        stabilizer.step()
    assert stabilizer.log is not None
    stabilizer.log.close()
    facts, description = load(folder)
    assert facts.scope == STEPS_ONLY
    assert facts.steps == steps
    return diagnose(facts, description, strict=True)


def test_a_healthy_run_is_healthy_and_says_what_it_was_judged_by(tmp_path: Path) -> None:
    diagnosis = train(tmp_path)
    assert diagnosis.verdict == "healthy"
    assert diagnosis.findings == ()
    assert diagnosis.summary == (
        "No fault was found in 120 steps. Only the steps were recorded: data and operations were not."
    )


def test_a_learning_rate_that_jumps_is_named_at_its_step(tmp_path: Path) -> None:
    def jump(step: int, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
        optimizer.param_groups[0]["lr"] = 5.0 if step >= 70 else 0.05
        return batch

    diagnosis = train(tmp_path, at=jump)
    first = diagnosis.findings[0]
    assert (first.cause, first.step, first.severity) == ("lr.schedule-broken", 70, "error")
    assert "jumps from 0.05 to 5 at step 70" in first.summary
    assert diagnosis.verdict == "broken"


def test_steps_skipped_for_nan_inputs_are_reported_without_a_guess(tmp_path: Path) -> None:
    def poison(step: int, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
        return torch.full_like(batch, float("nan")) if step in (50, 90) else batch

    diagnosis = train(tmp_path, at=poison)
    assert diagnosis.findings == ()
    assert diagnosis.verdict == "unknown"
    assert diagnosis.summary.startswith("2 of 120 steps were skipped, the first at step 50 (")
    assert "`surefoot replay`" in diagnosis.summary


@pytest.mark.parametrize("overflows", [(30, 60), range(60, 120)], ids=["now and then", "to the end"])
def test_overflows_are_no_fault_until_the_scaler_is_stuck(tmp_path: Path, overflows: Container[int]) -> None:
    diagnosis = train(tmp_path, overflows=overflows, scaler=sf.DynamicLossScaler(), escalation=None)
    causes = [finding.cause for finding in diagnosis.findings]
    if overflows == (30, 60):
        assert causes == []
        assert diagnosis.verdict in ("healthy", "unknown")
    else:
        assert causes == ["precision.scaler-stuck"]
        assert diagnosis.findings[0].evidence["skipped_at_end"] == 60


def test_a_loss_that_does_not_fall_is_unknown_and_no_finding(tmp_path: Path) -> None:
    diagnosis = train(tmp_path, lr=1e-9)
    assert diagnosis.findings == ()
    assert diagnosis.verdict == "unknown"
    assert "did not clearly fall" in diagnosis.summary


def test_three_steps_are_too_few(tmp_path: Path) -> None:
    diagnosis = train(tmp_path, steps=3)
    assert (diagnosis.verdict, diagnosis.summary) == (
        "unknown",
        "Too short to judge: only 3 losses were seen, and a curve needs 5.",
    )


def test_the_rate_is_not_judged_once_the_stabilizer_has_changed_it(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(folder)
    facts, description = load(folder)
    assert [setup.type for setup in description.optimizers] == ["SGD"]
    assert facts.optimizers[0].type == "SGD"
    assert facts.optimizers[0].first_group.lr == 0.05


def test_two_stabilizers_of_one_folder_are_two_optimizers(tmp_path: Path) -> None:
    models = [nn.Linear(4, 1), nn.Linear(4, 1)]
    stabilizers = [
        sf.TrainingStabilizer(model, kind(model.parameters(), lr=0.01), log=tmp_path)
        for model, kind in zip(models, (torch.optim.SGD, torch.optim.Adam), strict=True)
    ]
    for _ in range(10):
        for model, stabilizer in zip(models, stabilizers, strict=True):
            stabilizer.backward(model(torch.ones(2, 4)).square().mean())
            stabilizer.step()
    assert stabilizers[0].log is not None
    stabilizers[0].log.close()
    facts, _ = load(tmp_path)
    assert [(held.type, held.steps) for held in facts.optimizers] == [("SGD", 10), ("Adam", 10)]


def test_the_command_answers(tmp_path: Path) -> None:
    train(tmp_path)
    shown = CliRunner().invoke(app, ["diagnose", str(tmp_path)])
    assert shown.exit_code == 0
    assert "healthy · 120 steps" in shown.stdout
