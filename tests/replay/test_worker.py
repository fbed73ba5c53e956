"""The answer of one pass. Whole passes are in `test_script.py` and `test_replay_export.py`."""

from __future__ import annotations

import json
import math
import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from captured import capture, incidents_in
from replayed import target
from surefoot.record.incidents.reading import read_incident
from surefoot.replay.worker import Answer, _run_target, _why

if TYPE_CHECKING:
    from pathlib import Path


def left(answer: Answer, path: Path, why: str) -> dict[str, Any]:
    """What is in the file after the process that wrote it has ended."""
    process = os.fork()
    if process == 0:
        answer.fail(why)
    assert os.waitpid(process, 0)[1] == 0
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_an_answer_is_one_file_without_nan_and_then_the_process_ends(tmp_path: Path) -> None:
    path = tmp_path / "answer.json"
    answer = Answer(path)
    answer.found["notes"].append("a note")
    answer.found["differences"] = {"weight": {"largest": math.inf}}
    assert left(answer, path, "it did not train") == {
        "status": "failed",
        "notes": ["a note"],
        "differences": {"weight": {"largest": "inf"}},
        "error": "it did not train",
    }
    assert [each.name for each in tmp_path.iterdir()] == ["answer.json"]


def test_a_target_is_run_and_compared_with_the_record(tmp_path: Path) -> None:
    capture(tmp_path, "mlp", step=2)
    incident = read_incident(incidents_in(tmp_path)[0])
    answer = Answer(tmp_path / "answer.json")
    order: Any = {"target": target("mlp"), "locate": True, "export": None}
    _run_target(order, incident, answer)
    found = answer.found
    assert (found["status"], found["differences"], found["origin"]) == ("ran", {}, None)
    assert found["prints"]["gradients"] == incident.facts["fingerprints"]["gradients"]
    assert found["versions"]["torch"] == str(torch.__version__)


def test_a_script_that_never_reached_the_step_is_told_how_far_it_came() -> None:
    def why(**state: Any) -> str:
        first_step: Any = SimpleNamespace(**{"objects": object(), "feeds": True, "draws_seen": 0} | state)
        return _why(first_step)

    assert "it does not train a model" in why(objects=None)
    assert "it drew no batch" in why()
    assert "it drew 3 batches" in why(draws_seen=3)
