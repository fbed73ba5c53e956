"""Schedules of the learning rate, on real scripts; and those that rise or fall on purpose."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from recorded import optimizer, run
from surefoot.diagnose.rules import optimizer_schedule
from watched import CLASSES, LOOP, NET

if TYPE_CHECKING:
    from watched import Nursery


START = CLASSES + "loss_of = F.cross_entropy\n"
SCHEDULED = LOOP + "    pace.step()\n"


def scheduled(scheduler: str) -> str:
    return f"pace = torch.optim.lr_scheduler.{scheduler}\n"


BROKEN_SCHEDULES = {
    "decays once per batch": ("StepLR(optimizer, 5, gamma=0.1)", 25, "once per batch"),
    "has milestones in epochs": ("MultiStepLR(optimizer, [2, 4, 5], gamma=0.1)", 5, "once per batch"),
    "reaches its floor and climbs again": ("CosineAnnealingLR(optimizer, T_max=20)", 20, "T_max"),
    "only grows": ("ExponentialLR(optimizer, gamma=1.1)", 59, "only grows"),
    "jumps": ("LambdaLR(optimizer, lambda step: 0.01 if step < 30 else 300.0)", 30, "jumps"),
    "is rounded down to 0": ("LambdaLR(optimizer, lambda step: min(1, step // 20))", 0, "rounded down"),
    "becomes negative": ("LambdaLR(optimizer, lambda step: 1 - step / 40)", 59, "negative"),
}


@pytest.mark.parametrize("name", BROKEN_SCHEDULES)
def test_a_schedule_that_is_broken_is_named_with_its_step(watch: Nursery, name: str) -> None:
    scheduler, step, _ = BROKEN_SCHEDULES[name]
    run = watch(START, NET, scheduled(scheduler), SCHEDULED)
    found = run.names_first(
        "lr.schedule-broken",
        step=step,
        at="|pace = torch",
        evidence={"lr_first", "lr_highest", "lr_last", "schedulers", "steps"},
    )
    assert found.evidence["steps"] == 60


FINE_SCHEDULES = {
    "warm restarts": "CosineAnnealingWarmRestarts(optimizer, 15)",
    "one cycle": "OneCycleLR(optimizer, 3e-2, total_steps=60)",
    "a cosine to the end": "CosineAnnealingLR(optimizer, T_max=60)",
    "a warm-up": "LinearLR(optimizer, 0.01, total_iters=10)",
}


@pytest.mark.parametrize("name", FINE_SCHEDULES)
def test_a_schedule_that_rises_or_falls_on_purpose_is_fine(watch: Nursery, name: str) -> None:
    assert watch(START, NET.replace("lr=1e-2", "lr=2e-2"), scheduled(FINE_SCHEDULES[name]), SCHEDULED).causes == []


def plateau(patience: int) -> tuple[str, str, str, str]:
    """A script that looks for a plateau in every batch."""
    loop = LOOP.replace("range(60)", "range(160)") + "    pace.step(loss.item())\n"
    return START, NET.replace("1e-2", "5e-3"), scheduled(f"ReduceLROnPlateau(optimizer, patience={patience})"), loop


def test_a_plateau_that_is_looked_for_in_every_batch_is_named(watch: Nursery) -> None:
    """The noise of single batches is no plateau: the loss was falling when the rate was lowered."""
    run = watch(*plateau(3))
    assert run.first.cause == "lr.schedule-broken"
    assert "ReduceLROnPlateau is stepped once per batch" in run.first.summary


def test_a_plateau_that_is_looked_for_in_many_batches_is_fine(watch: Nursery) -> None:
    assert watch(*plateau(40)).causes == []


@pytest.mark.parametrize(("end", "is_named"), [(1.7, True), (0.4, False)])
def test_a_rate_that_is_almost_0_early_is_named_if_hardly_anything_was_learned(end: float, is_named: bool) -> None:
    losses = [max(end, 2.0 - 0.05 * step) for step in range(100)]
    held = optimizer(losses)
    held["series"]["lr"] = [0.01 * 0.92**step for step in range(100)]
    claim = optimizer_schedule.schedule_broken(run(losses, optimizers=[held]))
    assert (claim is not None) == is_named


def test_a_schedule_for_fewer_steps_is_only_mentioned_if_small_batches_learned_everything(watch: Nursery) -> None:
    easy = START.replace("y = ", "y = torch.arange(256) % 3; x[torch.arange(256), y] += 5.0 #")
    small = SCHEDULED.replace("(32,)", "(2,)").replace("range(60)", "range(400)")
    run = watch(easy, NET, scheduled("CosineAnnealingLR(optimizer, T_max=130)"), small)
    assert run.causes == []
    assert run.finding("lr.schedule-broken").severity == "info"
