"""The facts that a run log holds."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from surefoot.record.facts import IncidentEvent, OptimizerSetup, RunDescription
from surefoot.record.facts.of_log import SCALER_STUCK, facts_of_log
from surefoot.record.log import RunLog
from surefoot.record.messages import StepRow
from surefoot.record.reading import load_run

if TYPE_CHECKING:
    from pathlib import Path


def test_steps_overflows_and_incidents_become_facts(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        for step in range(5):
            loss = math.nan if step == 3 else 1.0
            row = StepRow(step, time.time(), loss=loss, grad_norm=2.0, lr=0.1, loss_scale=8.0, skipped=step == 3)
            log.take(row)
        log.event("overflow", 1, "fp16 gradients overflowed", action="skip")
        log.event("skip", 3, "the loss is nan", severity="error", cause="nonfinite", action="skip")
        log.event("skip", 4, "no lower scale", severity="error", cause=SCALER_STUCK, action="skip")
        log.event("checkpoint", 4, "saved")
    facts = facts_of_log(load_run(tmp_path), RunDescription(optimizers=[OptimizerSetup(type="Adam")]))
    held = facts.optimizers[0]
    assert (facts.steps, held.type, held.steps) == (5, "Adam", 5)
    assert held.series.loss == [1.0, 1.0, 1.0, None, 1.0]
    assert facts.loss_scaler.skip_steps == [1, 4]
    assert facts.events[0] == IncidentEvent(
        step=3, kind="nonfinite", severity="error", action="skip", summary="the loss is nan"
    )
    assert len(facts.events) == 2


def test_an_empty_log_has_no_steps(tmp_path: Path) -> None:
    RunLog(tmp_path).close()
    assert facts_of_log(load_run(tmp_path), RunDescription()).steps == 0


def test_each_part_is_an_optimizer(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        other = log.part("optimizer 2")
        for step in range(3):
            log.take(StepRow(step, time.time(), loss=1.0))
            other.take(StepRow(step, time.time(), loss=2.0))
    facts = facts_of_log(load_run(tmp_path), RunDescription())
    assert [held.series.loss[0] for held in facts.optimizers] == [1.0, 2.0]


def test_optimizers_are_matched_by_the_name_of_their_part(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        for part in ("second", "first", "shared"):
            log.part(part).take(StepRow(0, time.time(), loss=1.0))
    setups = [OptimizerSetup(part=part, type=kind) for part, kind in (("first", "Adam"), ("second", "SGD"))]
    setups += [OptimizerSetup(part="shared", type=kind) for kind in ("Adam", "SGD")]
    facts = facts_of_log(load_run(tmp_path), RunDescription(optimizers=setups))
    assert [held.type for held in facts.optimizers] == ["Adam", "SGD", "the optimizer"]
