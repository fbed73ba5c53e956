"""The folder of an incident: what is written, and what is left out and said to be."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from surefoot.core.redaction import Redactor
from surefoot.errors import SettingError
from surefoot.record.incidents.bundle import IncidentKeeper, as_plain, bytes_in, note_action, write_incident
from surefoot.record.incidents.environment import hardware, script, switches, versions
from surefoot.record.incidents.reading import read_incident

FACTS = {
    "step": 7,
    "kind": "nonfinite",
    "summary": "the loss is NaN",
    "action": "skip",
    "exact": True,
    "inexact": [],
    "signals": [{"step": 7, "loss": math.nan}],
    "configuration": {"optimizer": "SGD"},
    "versions": versions(),
    "hardware": hardware(torch.device("cpu")),
    "switches": switches(),
    "script": script(Redactor()),
    "fingerprints": {"loss": None, "losses": [], "inputs": [], "gradients": {}},
}


def written(tmp_path, tree, **settings):
    keeper = IncidentKeeper(tmp_path, **settings)
    place = keeper.place(7)
    write_incident(place, FACTS, tree, keeper, Redactor())
    return place, read_incident(place)


def test_the_state_is_read_back_and_numbers_that_json_lacks_are_words(tmp_path):
    place, found = written(tmp_path, {"models": [{"w": torch.tensor([1.0, math.nan])}], "scaler": None})
    assert found.state["models"][0]["w"].isnan().tolist() == [False, True]
    assert found.facts["parts"] == ["models"]
    assert found.facts["signals"][0]["loss"] == "nan"
    assert "the step was left out" in (place / "summary.md").read_text()


def test_what_is_least_needed_is_left_out_first_when_there_is_too_much(tmp_path):
    tree = {name: torch.zeros(100) for name in ("window", "models", "optimizer", "gradients")}
    _, found = written(tmp_path, tree, most_bytes=850)
    assert found.facts["parts"] == ["models", "window"]
    assert [words.split(";")[0] for words in found.facts["left_out"]] == [
        "the gradients of the step",
        "the optimizer's state",
    ]
    assert "(400 bytes, more than fits in 850)" in found.facts["left_out"][0]


def test_a_part_that_cannot_be_stored_is_named_and_the_others_are_written(tmp_path):
    _, found = written(tmp_path, {"models": [torch.ones(2)], "scheduler": {"lambda": object()}})
    assert found.facts["parts"] == ["models"]
    assert found.facts["left_out"][0].startswith("the state of the learning-rate schedule: scheduler.lambda is a ")


def test_the_action_is_added_later_in_both_files(tmp_path):
    place, _ = written(tmp_path, {})
    note_action(place, "roll_back")
    assert json.loads((place / "incident.json").read_text())["action"] == "roll_back"
    assert "What was done: roll_back." in (place / "summary.md").read_text()


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (True, True),
        (math.inf, "inf"),
        ((1, {2.5}), [1, [2.5]]),
        ({1: np.float32(0.5)}, {"1": 0.5}),
        (torch.tensor([[1, 2]]), [[1, 2]]),
        (torch.float16, "torch.float16"),
    ],
    ids=str,
)
def test_values_become_plain_json(value, plain):
    assert as_plain(value) == plain


def test_the_size_of_a_part_counts_tensors_and_arrays():
    assert bytes_in({"a": [torch.zeros(4)], "b": (np.zeros(2), "text")}) == 32


def test_an_incident_is_a_folder_named_after_its_step_part_and_rank(tmp_path):
    assert IncidentKeeper(tmp_path).place(123) == tmp_path / "incidents" / "000000123"
    assert IncidentKeeper(tmp_path, part="critic").place(7).name == "000000007-critic"
    assert IncidentKeeper(tmp_path).place(7, rank=1, world_size=2) == tmp_path / "rank1" / "incidents" / "000000007"


def test_there_is_room_until_there_are_too_many_and_once_for_each_step(tmp_path):
    keeper = IncidentKeeper(tmp_path, most=2)
    assert keeper.has_room(1)
    keeper.place(1).mkdir(parents=True)
    assert not keeper.has_room(1)
    assert keeper.has_room(2)
    (keeper.root() / "notes of somebody").mkdir()
    assert keeper.has_room(2)
    keeper.place(2).mkdir()
    assert not keeper.has_room(3)


@pytest.mark.parametrize("settings", [{"most": 0}, {"most_bytes": 0}, {"part": "../elsewhere"}])
def test_settings_without_a_meaning_are_refused(settings):
    with pytest.raises(SettingError):
        IncidentKeeper("runs", **settings)
