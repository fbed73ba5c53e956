"""What counts as a failure of the steps after an incident, and what counts as its cure."""

from __future__ import annotations

import math
from typing import Any

import pytest

from surefoot.experiments.after_incident import compare_after_incident, level_before, losses_before, read_after_incident
from surefoot.record.facts import RunDescription, RunFacts

NAN = math.nan
NOISY = [1.0 + 0.1 * math.sin(i) for i in range(40)]
LEVEL = level_before(NOISY)


def facts(losses: list[float], **more: Any) -> RunFacts:
    rows = [
        {"loss": str(loss) if not math.isfinite(loss) else loss, "grad_norm": 1.0, "lr": 0.1, "applied": True}
        | {"skipped": False}
        for loss in losses
    ]
    for k, changed in more.pop("rows", {}).items():
        rows[k] |= changed
    told = {"trail": rows, "open": [], "ended": "steps"} | more.pop("recorded", {})
    return RunFacts.from_json({"experiment": told, **more})


def reading(losses: list[float], level: Any = LEVEL, **more: Any) -> Any:
    return read_after_incident(facts(losses, **more), RunDescription(), step=100, level=level)


@pytest.mark.parametrize(
    ("losses", "outcome", "failed_at"),
    [
        ([1.0] * 21, "calm", None),
        ([50.0] + [1.0] * 20, "calm", None),  # a hard batch that did no harm
        ([1.0] + [9.0] * 8 + [1.0] * 12, "calm", None),  # thrown, and back
        ([NAN] + [1.0] * 20, "non-finite", 100),
        ([1.0, 1.0, NAN, NAN, NAN, NAN, NAN], "non-finite", 102),
        ([1.0] + [1.6] * 20, "risen", 101),
        ([1.0, 1.0, 1.0, *[2.0**k for k in range(1, 18)]], "risen", 103),
        ([], "too short", None),
    ],
)
def test_a_stretch_is_read_as_what_it_is(losses: list[float], outcome: str, failed_at: int | None) -> None:
    found = reading(losses)
    assert (found.outcome, found.failed_at) == (outcome, failed_at)


def test_the_bar_is_above_every_loss_of_the_best_stretch_before() -> None:
    falling = [3.0 - 0.05 * i for i in range(50)]
    assert LEVEL is not None
    assert LEVEL.bar >= max(NOISY)
    found = level_before(falling)
    assert found is not None
    assert found.middle == pytest.approx(1.025)  # of the last twenty
    set_back = level_before([*NOISY[:25], *[40.0] * 25])
    assert set_back is not None
    assert set_back.bar < 2.0
    assert level_before(NOISY[:7]) is None


def test_refused_steps_and_the_step_itself_are_no_history() -> None:
    rows = [{"step": i, "loss": 1.0, "skipped": i == 3} for i in range(6)] + [{"step": 6, "loss": "nan"}]
    assert losses_before({"step": 5, "signals": rows}) == [(0, 1.0), (1, 1.0), (2, 1.0), (4, 1.0)]


def test_without_history_only_what_is_plain_is_said() -> None:
    assert reading([1.0] + [1.6] * 20, level=None).outcome == "calm"
    assert reading([1.0] + [1e6] * 20, level=None).outcome == "risen"


def test_what_a_loss_scaler_leaves_out_later_is_its_business_unless_it_is_most() -> None:
    left_out = {"applied": False, "grad_norm": None}
    assert reading([1.0] * 21, rows={5: left_out}).outcome == "calm"
    at_once = reading([1.0] * 21, rows={0: left_out})
    assert (at_once.outcome, at_once.failed_at) == ("non-finite", 100)
    assert at_once.words == "gradients are not finite at the step itself, and the loss scaler skips the step"
    assert reading([1.0] * 21, rows=dict.fromkeys(range(1, 15), left_out)).failed_at == 101


def test_a_step_that_was_left_out_on_purpose_is_forgiven_unless_nearly_all_were() -> None:
    skipped = {"skipped": True}
    forgiven = reading([NAN] + [1.0] * 20, rows={0: skipped})
    assert (forgiven.outcome, forgiven.left_out) == ("calm", 1)
    assert forgiven.words == "stays at 1 (before: 0.986), 1 of 21 steps skipped"
    assert reading([NAN] * 21, rows=dict.fromkeys(range(21), skipped)).outcome == "non-finite"


def test_a_script_that_dies_of_a_bad_loss_has_failed_there() -> None:
    told = {"ended": "", "open": ["nan"]}
    found = reading([1.0, 1.0], recorded=told, crash={"type": "ValueError", "message": "loss is NaN"})
    assert (found.outcome, found.failed_at) == ("non-finite", 102)
    found = reading([1.0], recorded={"ended": ""}, crash={"type": "ValueError", "message": "got NaN"})
    assert (found.outcome, found.words) == ("crashed", "ValueError: got NaN")


def test_a_cure_is_calm_over_the_same_stretch_and_the_same_way() -> None:
    risen = reading([1.0] * 6 + [9.0] * 15)
    assert compare_after_incident(risen, reading([1.0] * 21))[0] == "cures"
    assert compare_after_incident(risen, risen)[0] == "does not"
    slow = reading([1.0] * 21, rows={k: {"lr": 0.01} for k in range(21)})
    assert compare_after_incident(risen, slow) == (
        "cannot tell",
        "reached only 35% of the baseline's distance (sum of learning rates)",
    )
    assert compare_after_incident(risen, reading([1.0] * 5))[0] == "cannot tell"
    at_once = reading([NAN] * 5)
    assert compare_after_incident(at_once, reading([1.0] * 21, rows={0: {"lr": 0.0}}))[0] == "cures"
