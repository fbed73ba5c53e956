"""Facts of a run of which only the steps are known."""

from __future__ import annotations

import math

from surefoot.record.facts import (
    STEPS_ONLY,
    FactsFromSteps,
    GroupSettings,
    IncidentEvent,
    OptimizerSetup,
    RunFacts,
    StepValues,
)


def made(count: int = 6, **numbers: float) -> FactsFromSteps:
    steps = FactsFromSteps()
    for step in range(count):
        steps.step(StepValues(step=step, loss=1.0 / (step + 1), lr=0.1, **numbers))
    return steps


def test_what_was_not_observed_is_left_empty_and_the_scope_says_so() -> None:
    facts = made().facts()
    assert (facts.scope, facts.steps) == (STEPS_ONLY, 6)
    assert facts.seeds is None
    assert facts.sampled_steps == []
    assert facts.optimizers[0].series.grad_norm == []


def test_they_are_written_and_read_like_any_facts() -> None:
    facts = made(grad_norm=2.0, clip_factor=0.5, loss_scale=1.0).facts()
    assert RunFacts.from_json(facts.to_json()) == facts


def test_the_loss_of_a_skipped_step_is_left_out() -> None:
    steps = made(2)
    steps.step(StepValues(step=2, loss=math.nan, skipped=True))
    series = steps.facts().optimizers[0].series
    assert series.loss == [1.0, 0.5, None]
    assert series.skipped == [False, False, True]


def test_clipping_is_the_norm_and_what_was_left_of_it() -> None:
    series = made(2, grad_norm=2.0, clip_factor=0.5).facts().optimizers[0].series
    assert (series.clip_norm, series.clip_limit) == ([2.0, 2.0], [1.0, 1.0])


def test_the_rate_counts_only_until_the_stabilizer_changes_it() -> None:
    steps = made(4)
    steps.incident(IncidentEvent(step=2, kind="nonfinite", severity="error", action="back_off", summary="x"))
    assert steps.facts().optimizers[0].series.lr == [0.1, 0.1, None, None]
    skipping = made(4)
    skipping.incident(IncidentEvent(step=2, kind="nonfinite", severity="error", action="skip", summary="x"))
    assert skipping.facts().optimizers[0].series.lr == [0.1] * 4


def test_overflows_are_those_of_a_scaler() -> None:
    steps = made(4, loss_scale=1024.0)
    steps.overflow(3)
    scaler = steps.facts().loss_scaler
    assert (scaler.enabled, scaler.attempts, scaler.skips, scaler.skip_steps) == (True, 4, 1, [3])
    assert scaler.trace == [1024.0] * 4
    assert not made(4, loss_scale=1.0).facts().loss_scaler.enabled


def test_an_optimizer_and_its_scheduler_are_named() -> None:
    steps = FactsFromSteps()
    settings = [GroupSettings.of({"params": [1], "lr": 0.1, "betas": (0.9, 0.99), "odd": object()})]
    steps.optimizer("", OptimizerSetup(type="Adam", settings=settings, scheduler="OneCycleLR"))
    steps.step(StepValues(step=0, loss=1.0))
    facts = steps.facts()
    assert facts.optimizers[0].first_group.values == {"lr": 0.1, "betas": [0.9, 0.99]}
    assert [(each.type, each.optimizer) for each in facts.schedulers] == [("OneCycleLR", 0)]


def test_steps_whose_rows_are_missing_are_counted() -> None:
    steps = FactsFromSteps()
    for step in [*range(10, 15), *range(20, 30)]:  # five were lost when the run was killed
        steps.step(StepValues(step=step, loss=1.0))
    facts = steps.facts()
    assert (facts.steps, facts.optimizers[0].steps, len(facts.optimizers[0].series.loss)) == (20, 20, 15)
