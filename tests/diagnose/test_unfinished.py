"""A run of `surefoot run` that was killed is judged by its log too, which goes on after the last saved facts."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

import surefoot as sf
from recorded import falling
from surefoot.cli import app
from surefoot.errors import UsageError
from surefoot.record.messages import StepRow

if TYPE_CHECKING:
    from pathlib import Path


def killed(folder: Path, losses: list[float], saved: int | None, lr: list[float] | None = None) -> Path:
    """A folder as a killed process leaves it: a log without an end, and the facts of the first steps."""
    log = sf.RunLog(folder, device_seconds=None)
    for step, loss in enumerate(losses):
        log.take(StepRow(step, time.time(), loss=loss, grad_norm=1.0, lr=0.1 if lr is None else lr[step]))
    log.close()
    (folder / "events.jsonl").unlink(missing_ok=True)  # the end, which a killed process does not write
    (folder / "run.json").write_text(json.dumps({"schema": 1, "script": "train.py", "exit_code": None}))
    if saved is not None:
        (folder / "facts.json").write_text(json.dumps({"schema": 1, "steps": saved}))
    return folder


def shown(folder: Path) -> Any:
    return CliRunner().invoke(app, ["diagnose", str(folder)])


def test_the_steps_of_the_log_count_and_what_is_known_of_them_is_named(tmp_path: Path) -> None:
    diagnosis = sf.diagnose(killed(tmp_path, falling(400), saved=1))
    assert (diagnosis.verdict, diagnosis.steps) == ("unknown", 400)
    assert diagnosis.summary == (
        "After 400 steps the script had not ended (killed, or still running); no fault was found until then. Data and "
        "operations were recorded up to step 1; of later steps, the loss and the gradient norm."
    )
    assert "judged by the state that was saved at step 1 and by the log up to step 400" in shown(tmp_path).stdout


def test_a_run_that_was_killed_before_any_facts_were_saved_is_judged_by_its_log(tmp_path: Path) -> None:
    folder = killed(tmp_path, falling(200), saved=None)
    assert "Only the loss and the gradient norm of each step were recorded." in sf.diagnose(folder).summary
    assert "  judged by the log up to step 200\n" in shown(folder).stdout


def test_a_rule_about_steps_finds_its_cause_in_the_log(tmp_path: Path) -> None:
    rates = [0.1] * 200 + [1000.0] * 200
    diagnosis = sf.diagnose(killed(tmp_path, falling(200) + [50.0] * 200, saved=10, lr=rates))
    assert (diagnosis.verdict, diagnosis.findings[0].cause) == ("broken", "lr.schedule-broken")
    assert diagnosis.findings[0].step == 200


def test_an_alarm_of_the_log_is_named_with_its_step(tmp_path: Path) -> None:
    folder = killed(tmp_path, [*falling(300), *[float("nan")] * 100], saved=1)
    event = {
        "event": "alarm",
        "step": 300,
        "summary": "the loss is nan",
        "severity": "error",
        "cause": "nonfinite-loss",
    }
    held = {"time": time.time(), "action": "", "part": "", "evidence": {}}
    (folder / "events.jsonl").write_text(json.dumps(event | held) + "\n")
    diagnosis = sf.diagnose(folder)
    assert diagnosis.verdict == "unknown"
    assert "; 1 incident, at step 300 (the loss is nan). Data and" in diagnosis.summary


def test_facts_that_are_newer_than_the_log_are_judged_alone(tmp_path: Path) -> None:
    diagnosis = sf.diagnose(killed(tmp_path, falling(20), saved=50))
    assert (diagnosis.steps, diagnosis.saved_steps) == (50, None)
    assert "After 50 steps the script had not ended" in diagnosis.summary


def test_a_folder_without_facts_and_rows_has_no_diagnosis(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="was not recorded to its end"):
        sf.diagnose(killed(tmp_path, [], saved=None))
