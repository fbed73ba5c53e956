"""Settings of the wrong type: one error that names the setting, what was given and what was expected."""

import inspect
from dataclasses import dataclass, fields, is_dataclass

import numpy as np
import pytest
import torch

import surefoot as sf
from part_arguments import ARGUMENTS
from surefoot.core.settings import check_types

NEEDED = ARGUMENTS | {"IncidentKeeper": ("runs/exp1",)}
CHECKED = ("int", "float", "bool", "str", "tuple[str, ...]")


def settings_of(name):
    """The fields of an exported class of settings whose type is checked, with whether they may be `None`."""
    made = getattr(sf, name)
    if not (inspect.isclass(made) and is_dataclass(made) and "__post_init__" in vars(made)):
        return []
    return [(name, each.name, each.type) for each in fields(made) if each.type.removesuffix(" | None") in CHECKED]


RESULTS = {"Check"}
"""Made by surefoot, not by users."""
SETTINGS = [setting for name in sf.__all__ if name not in RESULTS for setting in settings_of(name)]


def test_every_kind_of_part_has_settings_that_are_checked():
    found = {name for name, _, _ in SETTINGS}
    assert found >= {"ClipByNorm", "Explosion", "Plateau", "TrainingRecovery", "DynamicLossScaler", "LayerMetrics"}
    assert found >= {"StabilityChecker", "Escalation", "LogLimits", "ProgressAlarms", "IncidentKeeper", "NonFinite"}


@pytest.mark.parametrize(("name", "field", "kind"), SETTINGS, ids=lambda each: each)
def test_a_setting_of_the_wrong_type_is_refused_by_name(name, field, kind):
    known = dict(zip([each.name for each in fields(getattr(sf, name))], NEEDED.get(name, ()), strict=False))
    wrong = [object(), torch.tensor(float("nan")), [1.0], {}]
    wrong += [] if "str" in kind else ["a", float("nan")]
    wrong += [] if kind == "bool" else [True]
    wrong += [] if "None" in kind else [None]
    wrong += [1.5] if kind in ("int", "str") else []
    wrong += ["head.*"] if "tuple" in kind else []
    for value in wrong:
        with pytest.raises(sf.SettingError, match=rf"`{field}` .*; got ") as raised:
            getattr(sf, name)(**(known | {field: value}))
        assert "0x" not in str(raised.value)


def test_one_string_is_not_taken_as_the_patterns_of_its_letters():
    with pytest.raises(sf.SettingError, match=r"`exclude` must be a tuple of strings, .*; got 'head\.\*'"):
        sf.AdaptiveUnitClip(exclude="head.*")


def test_numbers_of_numpy_are_numbers():
    assert sf.ClipByQuantile(np.float32(0.5), np.int64(10)).init(1).window.shape == (10,)


def test_types_are_read_from_annotations_with_and_without_postponed_evaluation():
    @dataclass(frozen=True)
    class Settings:
        steps: int
        text: "str | None" = None
        other: object = None

    check_types(Settings(3, None, "anything"))
    with pytest.raises(sf.SettingError, match="`steps` must be a whole number; got '3'"):
        check_types(Settings("3"))
    with pytest.raises(sf.SettingError, match="`text` must be a string, or None; got 3"):
        check_types(Settings(3, 3))
