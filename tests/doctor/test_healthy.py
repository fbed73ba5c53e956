"""On healthy setups the preflight has nothing to say."""

from functools import cache

import pytest

from doctor_healthy import HEALTHY, build
from surefoot.doctor.checks import STEPS
from surefoot.doctor.examine import examine

pytestmark = pytest.mark.slow

LONG = ("mlp", "cnn", "frozen_body")
"""These get time enough for every probe; all of them, with more seeds: benchmarks/doctor_sweep.py."""


@cache
def examined(name):
    return examine(*build(name), seconds=5 if name in LONG else 0.3)


@pytest.fixture(scope="module")
def mlp():
    return examined("mlp")


@pytest.mark.parametrize("name", [name for name in HEALTHY if name != "transformer"])  # `warming_up` is one
def test_a_healthy_setup_gets_no_warning(name):
    examination = examined(name)
    assert [check for check in examination.checks if check.status in ("warn", "fail")] == []
    assert examination.ok
    assert examination.causes == ()


def test_every_step_answers_and_in_order(mlp):
    steps = [check.step for check in mlp.checks]
    assert steps == sorted(steps)
    assert set(steps) == set(STEPS)


def test_names_of_checks_are_unique(mlp):
    names = [check.name for check in mlp.checks]
    assert len(set(names)) == len(names)


def test_the_same_setup_gets_the_same_answer_twice():
    one, other = (examine(*build("linear_regression"), seconds=20) for _ in range(2))
    assert one.checks == other.checks


def test_a_matching_clip_passes_and_one_that_cuts_every_step_is_named():
    assert examine(*build("mlp"), clip=5.0, seconds=5)["clipping"].status == "pass"
    assert examine(*build("mlp"), clip=1e-3, seconds=5)["clipping"].cause == "clip.saturated"
