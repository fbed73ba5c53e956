"""On healthy setups the preflight has nothing to say."""

import pytest

from doctor_healthy import HEALTHY, build
from surefoot.diagnose.doctor.checks import STEPS
from surefoot.diagnose.doctor.examine import examine

SLOW = ("transformer", "warming_up")
CASES = [(name, seed) for name in HEALTHY for seed in ((0,) if name in SLOW else (0, 7))]


@pytest.mark.parametrize(("name", "seed"), CASES)
def test_a_healthy_setup_gets_no_warning(name, seed):
    examination = examine(*build(name, seed))
    assert [check for check in examination.checks if check.status in ("warn", "fail")] == []
    assert examination.ok
    assert examination.causes == ()


def test_every_step_answers_and_in_order():
    steps = [check.step for check in examine(*build("mlp"), seconds=5).checks]
    assert steps == sorted(steps)
    assert set(steps) == set(STEPS)


def test_names_of_checks_are_unique():
    names = [check.name for check in examine(*build("mlp"), seconds=5).checks]
    assert len(set(names)) == len(names)


def test_the_same_setup_gets_the_same_answer_twice():
    one, other = (examine(*build("regression")) for _ in range(2))
    assert one.checks == other.checks


def test_a_matching_clip_passes_and_one_that_cuts_every_step_is_named():
    assert examine(*build("mlp"), clip=5.0)["clipping"].status == "pass"
    assert examine(*build("mlp"), clip=1e-3)["clipping"].cause == "clip.saturated"
