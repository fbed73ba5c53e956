"""The tree of exceptions: one root, and the built-in that each also is."""

import pytest

import surefoot
from surefoot import errors


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("SettingError", ValueError),
        ("UsageError", RuntimeError),
        ("CheckpointError", RuntimeError),
        ("FolderInUse", RuntimeError),
        ("RankFailed", RuntimeError),
        ("TrainingHalted", RuntimeError),
    ],
)
def test_every_error_is_a_surefoot_error_and_a_builtin_one(name, builtin):
    error = getattr(surefoot, name)
    assert issubclass(error, errors.SurefootError)
    assert issubclass(error, builtin)


def test_a_halt_carries_its_incident():
    incident = surefoot.Incident(3, "nonfinite", "error", "NaN")
    assert errors.TrainingHalted("stopped", incident).incident is incident


def test_require_raises_only_where_the_condition_fails():
    errors.require(True, "fine")
    with pytest.raises(errors.SettingError, match="`n` must be positive"):
        errors.require(False, "`n` must be positive; got -1.")


def test_the_causes_of_an_error_follow_it_and_a_cycle_ends():
    first, second, third = ValueError("1"), ValueError("2"), ValueError("3")
    first.__cause__, second.__context__, third.__cause__ = second, third, first
    assert list(errors.with_causes(first)) == [first, second, third]
    assert list(errors.with_causes(None)) == []
