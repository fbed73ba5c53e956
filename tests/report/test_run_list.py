"""The run folders below a directory."""

import json
import os

import pytest

from runlogs import step_row
from surefoot.errors import UsageError
from surefoot.record.limits import LogLimits
from surefoot.record.messages import Batch, Event
from surefoot.record.store import Store
from surefoot.report.run_list import list_runs, newest_run


def write(folder, name, value, age=0.0):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(value))
    os.utime(folder / name, (1e9 - age, 1e9 - age))


FINDINGS = {"schema": 1, "verdict": "broken", "steps": 300, "findings": [{"cause": "lr.too-high"}, {"cause": "other"}]}


def test_the_newest_comes_first_with_verdict_steps_and_first_cause(tmp_path):
    write(tmp_path / "old", "run.json", {"schema": 1}, age=100)
    write(tmp_path / "sweep" / "trial", "run.json", {"schema": 1, "exit_code": 1})
    write(tmp_path / "sweep" / "trial", "findings.json", FINDINGS)
    trial, old = list_runs(tmp_path)
    assert trial == (tmp_path / "sweep" / "trial", 1e9, "broken", 300, "lr.too-high")
    assert (old.folder, old.verdict, old.steps, old.cause) == (tmp_path / "old", "not diagnosed", None, "")


def test_a_run_that_has_not_ended_says_so(tmp_path):
    write(tmp_path / "run", "run.json", {"schema": 1, "exit_code": None})
    assert list_runs(tmp_path)[0].verdict == "unfinished"


def test_a_guarded_run_is_diagnosed_by_its_log(tmp_path):
    store = Store(tmp_path / "run", LogLimits())
    store.write(Batch([step_row(step, loss=2.0 / (1 + step), grad_norm=1.0) for step in range(200)]))
    write(tmp_path / "run", "run.json", {"schema": 1})
    (unfinished,) = list_runs(tmp_path)
    assert (unfinished.verdict, unfinished.steps) == ("unfinished", 200)
    store.write(Batch(events=[Event("end", 199, "the log was closed", 1e9)]))
    store.close()
    (finished,) = list_runs(tmp_path)
    assert (finished.verdict, finished.steps, finished.cause) == ("healthy", 200, "")


def test_the_ranks_of_a_run_are_one_entry(tmp_path):
    for rank in range(2):
        write(tmp_path / "run" / f"rank{rank}", "findings.json", FINDINGS)
        write(tmp_path / "run" / f"rank{rank}", "run.json", {"schema": 1})
    (only,) = list_runs(tmp_path)
    assert (only.folder, only.verdict) == (tmp_path / "run", "broken")


def test_a_report_written_later_does_not_make_a_run_newer(tmp_path):
    write(tmp_path / "a", "run.json", {"schema": 1}, age=100)
    (tmp_path / "a" / "report.html").write_text("")
    write(tmp_path / "b", "run.json", {"schema": 1})
    assert newest_run(tmp_path) == tmp_path / "b"


def test_links_hidden_folders_and_what_lies_inside_a_run_are_left_out(tmp_path):
    write(tmp_path / "run", "run.json", {"schema": 1})
    write(tmp_path / "run" / "incidents" / "step-3", "run.json", {"schema": 1})
    write(tmp_path / ".hidden", "run.json", {"schema": 1})
    (tmp_path / "link").symlink_to(tmp_path)
    assert [run.folder for run in list_runs(tmp_path)] == [tmp_path / "run"]


def test_where_there_is_none(tmp_path):
    assert list_runs(tmp_path) == []
    with pytest.raises(UsageError, match="none found below"):
        newest_run(tmp_path)
    with pytest.raises(UsageError, match="no directory"):
        list_runs(tmp_path / "nowhere")


def test_healthy_ranks_are_not_a_healthy_run_before_they_are_compared(tmp_path):
    healthy = {"schema": 1, "verdict": "healthy", "steps": 9, "findings": []}
    for name in ("run/rank0", "run/rank1", "alone"):
        write(tmp_path / name, "findings.json", healthy)
        write(tmp_path / name, "run.json", {"schema": 1})
    assert {run.folder.name: run.verdict for run in list_runs(tmp_path)} == {"run": "not compared", "alone": "healthy"}


def test_the_worst_verdict_of_the_ranks_is_that_of_the_run(tmp_path):
    write(tmp_path / "run" / "rank0", "findings.json", {"schema": 1, "verdict": "healthy", "steps": 9, "findings": []})
    write(tmp_path / "run" / "rank1", "findings.json", FINDINGS)
    (only,) = list_runs(tmp_path)
    assert (only.verdict, only.cause) == ("broken", "lr.too-high")


@pytest.mark.parametrize(
    "value", [{"findings": None}, {"steps": "12"}, {"findings": ["x"]}, {"findings": [{"cause": 3}]}, {"verdict": []}]
)
def test_a_file_that_makes_no_sense_is_no_obstacle(tmp_path, value):
    write(tmp_path / "bad", "findings.json", {"schema": 1, **value})
    write(tmp_path / "bad", "run.json", {"schema": 1})
    write(tmp_path / "good", "run.json", {"schema": 1})
    assert {run.folder.name for run in list_runs(tmp_path)} == {"bad", "good"}


def test_a_run_of_a_newer_version_is_listed_as_not_readable(tmp_path):
    write(tmp_path / "newer", "run.json", {"schema": 99})
    write(tmp_path / "good", "findings.json", FINDINGS)
    write(tmp_path / "good", "run.json", {"schema": 1})
    assert {run.folder.name: run.verdict for run in list_runs(tmp_path)} == {"newer": "not readable", "good": "broken"}
