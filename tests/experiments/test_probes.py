"""What the outcome of a probe says about where the cause lies."""

import pytest

from surefoot.experiments.probes import not_learned, tells
from surefoot.experiments.run_comparison import RunReading


def reading(outcome, start=2.0, end=1.0, words=""):
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
    assert words in tells(name, reading(baseline), reading(changed))


def test_a_run_that_is_too_short_only_says_so():
    assert tells("other-seed", reading("diverged"), reading("too short", words="3 steps")) == "3 steps"


def test_a_few_rows_far_above_noise_are_not_learned():
    assert "not learned" in not_learned(reading("learned", end=1e6), reading("learned", end=1.0))
    assert not_learned(reading("learned"), reading("learned")) is None
    assert not_learned(reading("learned", end=1e6), reading("stuck")) is None
