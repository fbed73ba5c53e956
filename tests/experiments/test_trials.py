"""How a run that has ended becomes a row, before its losses are looked at."""

from __future__ import annotations

import json
import subprocess
import time
from typing import TYPE_CHECKING, Any

import pytest

from patience import HANG_SECONDS
from surefoot.experiments.plan import BY_NAME, Change
from surefoot.experiments.processes import Child, Children, Subject
from surefoot.experiments.trials import REPEAT, Trials, cores, default_jobs

if TYPE_CHECKING:
    from pathlib import Path

    from surefoot.experiments.changes.run_order import RunOrder
    from surefoot.experiments.results import Row
    from surefoot.record.facts import RunDescription, RunFacts


class Cured:
    """Finds every run that is judged at all cured."""

    def nothing_to_change(self, change: Change) -> str | None:
        return "nothing to change"

    def order(self, change: Change, seconds_left: float) -> RunOrder:
        return {"change": change.name, "seconds": seconds_left}

    def judge(self, row: Row, change: Change, facts: RunFacts, description: RunDescription) -> None:
        row.verdict, row.why = "cures", ""


def trials(folder: Path, deadline: float = HANG_SECONDS) -> Trials:
    children = Children(Subject("train.py", folder=folder), folder, threads=1)
    return Trials(children, Cured(), time.monotonic() + deadline, 1, lambda name, words: None)


def judged(folder: Path, experiment: dict[str, Any] | None, change: str = "clip", code: int | None = 0) -> Row:
    if experiment is not None:
        (folder / "facts.json").write_text(json.dumps({"schema": 1, "steps": 3, "experiment": experiment}))
        (folder / "run.json").write_text(json.dumps({"exit_code": code}))
    with subprocess.Popen(["true"]) as process:
        child = Child(change, folder, process, folder / "scratch", time.monotonic())
    return trials(folder)._judged(child, BY_NAME[change])


@pytest.mark.parametrize(
    ("experiment", "code", "verdict", "why"),
    [
        (None, 0, "cannot tell", "recorded nothing"),
        ({"acted": 1}, None, "not run", "stopped: budget"),
        ({"acted": 1, "problem": "KeyError: x"}, 0, "does not apply", "could not be applied: KeyError: x"),
        ({"acted": 1, "why_not": "a single row"}, 0, "does not apply", "a single row"),
        ({"acted": 0}, 0, "does not apply", "no gradient norm is above 1.0"),
        ({"acted": 2, "notes": ["a note"]}, 0, "cures", ""),
        ({"acted": 2, "ended": "steps"}, None, "cures", ""),
    ],
)
def test_a_run_is_judged_only_if_it_was_an_experiment(
    tmp_path: Path, experiment: dict[str, Any] | None, code: int | None, verdict: str, why: str
) -> None:
    row = judged(tmp_path, experiment, code=code)
    assert row.verdict == verdict
    assert row.why.startswith(why)
    assert row.notes == (experiment or {}).get("notes", [])


def test_after_the_deadline_nothing_is_started(tmp_path: Path) -> None:
    rows = trials(tmp_path, deadline=-1.0).run([BY_NAME["clip"]], [BY_NAME["clip"]])
    assert [(row.name, row.verdict, row.why) for row in rows] == [
        (REPEAT.name, "not run", "budget"),
        ("clip", "does not apply", "nothing to change"),
    ]


def test_a_cure_of_a_failure_that_does_not_come_again_is_no_cure(tmp_path: Path) -> None:
    held = trials(tmp_path)
    row = judged(tmp_path, {"acted": 1})
    assert held._settled(row).verdict == "cures"
    held.flaky = True
    assert held._settled(row).verdict == "cannot tell"


def test_as_many_runs_at_a_time_as_half_of_the_cores() -> None:
    assert 1 <= default_jobs() <= max(1, cores() // 2)
