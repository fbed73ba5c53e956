"""Which steps are looked at closely."""

import pytest

from surefoot.errors import SettingError
from surefoot.observe.sampling import Sampling


def test_many_at_the_start_and_then_ever_fewer():
    due = [step for step in range(5_000) if Sampling().due(step)]
    assert due[:8] == [0, 1, 2, 3, 5, 8, 12, 18]
    assert len(due) == 22


def test_later_a_step_is_looked_at_every_so_often():
    sampling = Sampling(every_steps=100)
    assert [step for step in range(100, 500) if sampling.due(step)] == [100, 200, 300, 400]


def test_it_goes_by_the_step_alone_so_that_a_resumed_run_looks_at_the_same_steps():
    assert [Sampling().due(step) for step in range(300, 400)] == [Sampling().due(step) for step in range(300, 400)]


@pytest.mark.parametrize("settings", [{"growth": 1.0}, {"every_steps": 0}])
def test_settings_without_a_meaning_are_refused(settings):
    with pytest.raises(SettingError):
        Sampling(**settings)
