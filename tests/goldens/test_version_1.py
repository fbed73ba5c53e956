"""Files of version 1: what they hold is compared in `test_texts.py`; here today's code goes on with them.

Of a format that has changed since, files of the current version are in a later folder: today's code writes the same.
"""

import re

import pytest
import torch

from goldens import version_files
from goldens.golden import VERSION_1, described
from goldens.loops import FEATURES, Loop
from goldens.version_files import DIGITS, MAKERS, STATE_FEATURE, newest, unpack, up_to_date
from resumed import differences
from surefoot.decide.raised_rate import RateState
from surefoot.guard.stabilizer import run_of


def same_lines(now, before):
    """Whether two texts are equal; where they are not, the lines that only one of them has."""
    gone = [line for line in before.splitlines() if line not in set(now.splitlines())]
    new = [line for line in now.splitlines() if line not in set(before.splitlines())]
    assert (gone[:20], new[:20]) == ([], [])
    assert now == before


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return unpack("checkpoints", tmp_path_factory.mktemp("v1"))


@pytest.fixture(scope="module")
def newest_checkpoints(tmp_path_factory):
    return unpack("checkpoints", tmp_path_factory.mktemp("newest"), newest("checkpoints"))


@pytest.mark.parametrize("feature", FEATURES)
def test_a_checkpoint_is_written_as_it_was(feature, newest_checkpoints, tmp_path):
    version_files.make_checkpoint(feature, tmp_path)
    now = version_files.checkpoint_content(feature, tmp_path)
    before = version_files.checkpoint_content(feature, newest_checkpoints / feature)
    same_lines(described(now, DIGITS), described(before, DIGITS))


@pytest.mark.parametrize("feature", FEATURES)
def test_a_checkpoint_of_version_1_holds_the_same_under_other_names(feature, checkpoints, newest_checkpoints):
    before, now = (
        version_files.checkpoint_content(feature, folder / feature) for folder in (checkpoints, newest_checkpoints)
    )
    migrated = {**before, "state": up_to_date(before["state"])}
    same_lines(described(_without_added(migrated), DIGITS), described(_without_added(now), DIGITS))


def _without_added(content):
    """A checkpoint's content without what later versions have added: of the state, which starts anew, and its rank."""
    own = content["state"]["stabilizer"]
    settings = {name: text for name, text in own["policy"]["settings"].items() if name != "lost_progress"}
    policy = {**own["policy"], "settings": settings, "lost_progress": None}
    state = _without_later({**content["state"], "stabilizer": {**own, "policy": policy}})
    return {**content, "state": state} | ({"facts": {**content["facts"], "metric": None}} if "facts" in content else {})


LATER = {"window": {"accumulate": None}, "history": {"recent_norms": [], "rates": RateState()._asdict()}}
"""What later versions have added to parts of the state, as it is in a state that is converted."""


def _without_later(state):
    """A state without these values, also in other stabilizers in it."""
    if not isinstance(state, dict):
        return state
    parts = {name: _without_later(each) for name, each in state.items()}
    return {name: {**each, **LATER.get(name, {})} if isinstance(each, dict) else each for name, each in parts.items()}


@pytest.mark.parametrize("feature", [name for name in FEATURES if name not in ("grad_scaler", "two_models")])
def test_a_run_continues_with_exactly_what_a_checkpoint_of_version_1_holds(feature, checkpoints):
    resumed = _without_added(version_files.resumed_content(feature, checkpoints / feature))["state"]
    saved = version_files.checkpoint_content(feature, checkpoints / feature)["state"]
    saved = _without_added({"state": up_to_date(saved)})["state"]
    assert differences(resumed, {name: saved[name] for name in resumed}) == []


def test_a_run_that_returns_to_a_checkpoint_of_version_1_takes_its_rules(tmp_path):
    saved = torch.load(unpack("states", tmp_path / "v1") / "stabilizer.pt", weights_only=True)
    loop = Loop(STATE_FEATURE, tmp_path / "unused")
    run_of(loop.stabilizer)._load_rules(saved)
    assert float(loop.stabilizer.state_dict()["policy"]["rules"][1]["accepted"]) == 5.0


@pytest.mark.parametrize("name", ["states", "standardizer", "run_log", "incident"])
def test_it_is_written_as_it_was(name, tmp_path):
    text = getattr(version_files, f"{name}_text")
    (tmp_path / "now").mkdir()
    MAKERS[name](tmp_path / "now")
    before = unpack(name, tmp_path / "before", newest(name))
    same_lines(text(tmp_path / "now", DIGITS), text(before, DIGITS))


def test_the_facts_of_a_run_are_as_they_were(watch, tmp_path):
    (tmp_path / "now").mkdir()
    version_files.make_run(tmp_path / "now", watch)
    before = unpack("run", tmp_path / "before", newest("run"))
    same_lines(version_files.facts_text(tmp_path / "now", DIGITS), version_files.facts_text(before, DIGITS))


@pytest.mark.parametrize("name", MAKERS)
def test_nothing_tells_of_the_machine_it_was_written_on(name, tmp_path):
    folders = {unpack(name, tmp_path / version.name, version) for version in (VERSION_1, newest(name))}
    found = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    assert found
    for path in found:
        data = path.read_bytes()
        assert not re.findall(rb"/(?:home|root|tmp|work|Users)\b", data), path
        assert not path.name.startswith(".")
