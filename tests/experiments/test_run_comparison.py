"""What counts as a failure, and what counts as a cure."""

from __future__ import annotations

import math
from typing import Any

import pytest

from recorded import completed, falling, optimizer, parameter
from surefoot.experiments.run_comparison import RunReading, compare, is_numeric, not_learned, probe_text, read
from surefoot.record.facts import RunDescription, RunFacts

NAN = math.nan


def facts(losses: list[float], lr: float = 0.01, **more: Any) -> RunFacts:
    held = optimizer(losses)
    held["series"]["lr"] = [lr] * len(losses)
    base = {"steps": len(losses), "optimizers": [held], "parameters": [parameter(0)], "events": [], "sampled_steps": []}
    return RunFacts.from_json(completed(RunFacts, base | {"experiment": {}} | more))


def reading(losses: list[float], verdict: str = "broken", lr: float = 0.01, **more: Any) -> RunReading:
    return read(facts(losses, lr, **more), RunDescription(), verdict)


FLAT = [2.3 + 0.01 * (i % 3) for i in range(100)]
BROKEN = falling(20) + [NAN] * 25


@pytest.mark.parametrize(
    ("losses", "outcome", "failed_at"),
    [
        (falling(), "learned", None),
        (FLAT, "stuck", None),
        (BROKEN, "non-finite", 20),
        (falling(30) + [50.0 * 1.1**i for i in range(70)], "diverged", 30),
        ([2.0, 1.9], "too short", None),
    ],
)
def test_a_curve_is_read_as_what_it_is(losses: list[float], outcome: str, failed_at: int | None) -> None:
    found = reading(losses)
    assert (found.outcome, found.failed_at) == (outcome, failed_at)


def test_a_noisy_fall_is_a_fall_and_a_blow_up_that_came_back_is_none() -> None:
    noisy = [1.0 - 0.008 * i + 0.4 * (i % 2) for i in range(100)]
    assert reading(noisy).outcome == "learned"
    assert reading([2.2] * 10 + [90.0] * 10 + [2.2 + 0.01 * (i % 2) for i in range(80)]).fails


def test_a_run_that_the_diagnosis_calls_healthy_is_not_stuck() -> None:
    assert reading(FLAT, "healthy").outcome == "learned"
    assert reading(BROKEN, "healthy").outcome == "non-finite"


def test_a_crash_is_a_failure_and_an_end_from_outside_is_none() -> None:
    crash = {"type": "ValueError", "message": "got NaN"}
    found = reading(falling(30), crash=crash)
    assert (found.outcome, found.failed_at, found.crash) == ("crashed", 30, "ValueError: got NaN")
    assert reading(falling(30), crash=crash, experiment={"ended": "steps"}).outcome == "learned"
    assert is_numeric(found.crash)
    assert not is_numeric("FileNotFoundError: data.csv")
    assert not is_numeric("RuntimeError: CUDA out of memory")


def test_batches_that_throw_the_loss_are_distinguished_from_their_aftershocks() -> None:
    losses = falling()
    losses[5], losses[6], losses[70], losses[71] = 500.0, 60.0, 600.0, 9.0
    found = reading(losses)
    assert (found.outcome, found.failed_at, found.bad_steps) == ("spiked", 5, (5, 6, 70))
    assert reading([*losses[:5], 3.0, *losses[6:]]).bad_steps == (6, 70)


def test_steps_that_were_left_out_are_forgiven_unless_they_are_many() -> None:
    losses = falling()
    losses[40], losses[50] = NAN, 900.0
    events = [{"event": "nonfinite-loss", "step": 40}]
    assert reading(losses, events=events).outcome == "non-finite"
    assert reading(losses, events=events, experiment={"skipped": [40, 50]}).outcome == "learned"
    assert reading(losses, events=events, experiment={"skipped": [40]}).outcome == "spiked"
    many = reading(losses, events=events, experiment={"skipped": list(range(10, 90))})
    assert (many.outcome, many.words[-25:]) == ("stuck", ", 80 of 100 steps skipped")


def test_a_change_cures_if_the_run_learns_beyond_the_point_of_failure() -> None:
    assert compare(reading(BROKEN), reading(falling(200)))[0] == "cures"
    assert compare(reading(BROKEN), reading(FLAT))[0] == "does not"
    assert compare(reading(BROKEN), reading(BROKEN))[0] == "does not"
    assert compare(reading(FLAT), reading(falling()))[0] == "cures"


def test_a_run_that_is_only_slower_is_no_cure() -> None:
    baseline = reading(falling(400, end=0.5) + [NAN] * 25)
    slow = reading([2.0 - 0.002 * i for i in range(425)], lr=0.001)
    assert slow.outcome == "learned"
    assert compare(baseline, slow) == (
        "cannot tell",
        "reached only 11% of the baseline's distance (sum of learning rates)",
    )
    lower = reading(falling(425, end=0.1), lr=0.001)
    assert compare(baseline, lower)[0] == "cures"  # deeper than the baseline ever was


def test_noise_is_no_cure_of_a_run_that_is_stuck() -> None:
    baseline = reading([2.3 + 0.3 * (i % 2) for i in range(100)])
    slightly = reading([2.6, *([2.15 + 0.3 * (i % 2) for i in range(99)])])
    assert compare(baseline, slightly)[0] == "does not"


def reading_of(outcome, start=2.0, end=1.0, words=""):
    return RunReading(outcome, 100, start=start, end=end, words=words)


@pytest.mark.parametrize(
    ("name", "baseline", "changed", "words"),
    [
        ("other-seed", "diverged", "diverged", "also fails with another seed"),
        ("other-seed", "diverged", "learned", "it depends on chance"),
        ("tiny-batch", "stuck", "stuck", "not even a few rows"),
        ("synthetic-inputs", "diverged", "diverged", "values of the inputs are not the cause"),
        ("synthetic-inputs", "diverged", "learned", "it fails only on its own"),
        ("shuffled-labels", "diverged", "diverged", "also fails with shuffled labels"),
        ("shuffled-labels", "diverged", "learned", "does not fail with shuffled labels"),
    ],
)
def test_one_line_per_probe(name, baseline, changed, words):
    assert words in probe_text(name, reading_of(baseline), reading_of(changed))


def test_a_run_that_is_too_short_only_says_so():
    assert probe_text("other-seed", reading_of("diverged"), reading_of("too short", words="3 steps")) == "3 steps"


def test_a_few_rows_far_above_noise_are_not_learned():
    assert "not learned" in not_learned(reading_of("learned", end=1e6), reading_of("learned", end=1.0))
    assert not_learned(reading_of("learned"), reading_of("learned")) is None
    assert not_learned(reading_of("learned", end=1e6), reading_of("stuck")) is None


def test_a_change_that_makes_a_stuck_run_learn_cures_it_although_one_loss_jumps() -> None:
    losses = [2.3 * 0.95**step for step in range(100)]
    losses[60] = 90.0
    changed = reading(losses)
    assert changed.outcome == "spiked"
    result, words = compare(reading(FLAT), changed)
    assert result == "cures"
    assert words.startswith("ends at 0.01")
    assert "spiked at step 60" in words


def test_a_change_that_moves_a_spike_elsewhere_is_no_cure() -> None:
    losses = falling()
    losses[60] = 900.0
    moved = falling()
    moved[30] = 900.0
    assert compare(reading(losses), reading(moved))[0] == "does not"
