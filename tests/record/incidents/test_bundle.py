"""The folder of an incident: what is written, and what is left out and said to be."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from surefoot.core.redaction import Redactor
from surefoot.record.incidents.bundle import as_plain, bytes_in, note_action, write_incident
from surefoot.record.incidents.environment import hardware, script, switches, versions
from surefoot.record.incidents.reading import read_incident
from surefoot.record.incidents.retention import IncidentKeeper

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
