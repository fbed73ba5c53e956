"""Files of version 1: what they hold is compared in `test_texts.py`; here today's code writes the same again."""

import re

import pytest

from goldens import version_files
from goldens.golden import described
from goldens.loops import FEATURES
from goldens.version_files import DIGITS, MAKERS, unpack
from resumed import differences


def same_lines(now, before):
    """Whether two texts are equal; where they are not, the lines that only one of them has."""
    gone = [line for line in before.splitlines() if line not in set(now.splitlines())]
    new = [line for line in now.splitlines() if line not in set(before.splitlines())]
    assert (gone[:20], new[:20]) == ([], [])
    assert now == before


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return unpack("checkpoints", tmp_path_factory.mktemp("v1"))


@pytest.mark.parametrize("feature", FEATURES)
def test_a_checkpoint_is_written_as_it_was(feature, checkpoints, tmp_path):
    version_files.make_checkpoint(feature, tmp_path)
    now = version_files.checkpoint_content(feature, tmp_path)
    before = version_files.checkpoint_content(feature, checkpoints / feature)
    same_lines(described(now, DIGITS), described(before, DIGITS))


@pytest.mark.parametrize("feature", [name for name in FEATURES if name not in ("grad_scaler", "two_models")])
def test_a_run_goes_on_with_exactly_what_a_checkpoint_of_version_1_holds(feature, checkpoints):
    resumed = version_files.resumed_content(feature, checkpoints / feature)["state"]
    saved = version_files.checkpoint_content(feature, checkpoints / feature)["state"]
    assert differences(resumed, {name: saved[name] for name in resumed}) == []


@pytest.mark.parametrize("name", ["states", "standardizer", "run_log", "incident"])
def test_it_is_written_as_it_was(name, tmp_path):
    text = getattr(version_files, f"{name}_text")
    (tmp_path / "now").mkdir()
    MAKERS[name](tmp_path / "now")
    same_lines(text(tmp_path / "now", DIGITS), text(unpack(name, tmp_path / "before"), DIGITS))


def test_the_facts_of_a_run_are_as_they_were(watch, tmp_path):
    (tmp_path / "now").mkdir()
    version_files.make_run(tmp_path / "now", watch)
    before = unpack("run", tmp_path / "before")
    same_lines(version_files.facts_text(tmp_path / "now", DIGITS), version_files.facts_text(before, DIGITS))


@pytest.mark.parametrize("name", MAKERS)
def test_nothing_tells_of_the_machine_it_was_written_on(name, tmp_path):
    folder = unpack(name, tmp_path)
    found = [path for path in folder.rglob("*") if path.is_file()]
    assert found
    for path in found:
        data = path.read_bytes()
        assert not re.findall(rb"/(?:home|root|tmp|work|Users)\b", data), path
        assert not path.name.startswith(".")
