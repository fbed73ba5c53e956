"""Commands over recorded runs: runs, diagnose, watch, report, serve."""

import json
import time
from pathlib import Path

import pytest

import report_runs
from surefoot.commands.recorded_run import run_lines
from surefoot.report.run_list import ListedRun


@pytest.fixture
def judged(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "facts.json").write_text("{}")
    report_runs.describe(folder)
    return folder


def test_diagnose_prints_the_contract_as_json(command, judged):
    answer = command("diagnose", judged, "--json")
    found = json.loads(answer.out)
    assert (answer.code, answer.error) == (0, "")
    assert set(found) == {"schema", "verdict", "steps", "summary", "findings"}
    assert (found["schema"], found["verdict"]) == (1, "unknown")


def test_a_run_that_did_not_end_is_said_to_be_so(command, judged):
    report_runs.describe(judged, exit_code=None)
    assert "the script had not ended" in command("diagnose", judged).out


@pytest.mark.parametrize("name", ["diagnose", "report"])
def test_what_is_no_run_folder_is_one_line_on_stderr_and_exit_code_2(command, tmp_path, name):
    answer = command(name, tmp_path / "nothing")
    assert (answer.code, answer.out) == (2, "")
    (line,) = answer.error.splitlines()
    assert line.startswith("surefoot: no run folder at")


def test_report_writes_the_page_and_prints_its_path(command, tmp_path):
    folder = report_runs.quiet(tmp_path / "run", steps=20)
    answer = command("report", folder, "-o", tmp_path / "page.html")
    assert (answer.code, answer.out.strip()) == (0, str(tmp_path / "page.html"))
    assert "<!doctype html>" in (tmp_path / "page.html").read_text()[:100].lower()


def test_watch_prints_one_view_and_ends(command, tmp_path):
    folder = report_runs.quiet(tmp_path / "run", steps=20)
    answer = command("watch", folder, "--once")
    assert answer.code == 0
    assert "finished: healthy" in answer.out


def test_a_port_that_is_taken_is_refused_with_the_way_out(command, tmp_path):
    from surefoot.report.page.serve import LiveServer

    with LiveServer(tmp_path, port=0) as server:
        answer = command("serve", tmp_path, "--port", server.port)
    assert answer.code == 2
    assert "--port" in answer.error


def test_without_a_folder_the_newest_run_is_taken_and_named(command, judged, monkeypatch):
    runs = judged.parent / "runs"
    runs.mkdir()
    judged.rename(runs / "first")
    monkeypatch.chdir(runs.parent)
    answer = command("diagnose")
    assert (answer.code, answer.error) == (0, "surefoot: the newest run: runs/first\n")
    assert "runs/first" in answer.out


def test_without_a_folder_and_without_runs_it_is_wrong_use(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    answer = command("report")
    assert (answer.code, answer.out) == (2, "")
    assert answer.error == "surefoot: no run folder given, and none found below runs/. Pass the folder of a run.\n"


def test_in_a_narrow_terminal_a_cause_is_on_the_line_below_its_run():
    found = [
        ListedRun(Path("runs/a"), time.time(), "broken", 282, "loss.softmax-before-cross-entropy"),
        ListedRun(Path("runs/b"), time.time(), "healthy", 1500, ""),
    ]
    wide, narrow = run_lines(found, None), run_lines(found, 60)
    assert wide[0].endswith("  282 steps  loss.softmax-before-cross-entropy")
    assert narrow[0].endswith("  282 steps\n    loss.softmax-before-cross-entropy")
    assert narrow[1] == wide[1]
    assert max(len(line) for text in narrow for line in text.splitlines()) <= 60


def test_runs_lists_them(command, judged):
    answer = command("runs", judged.parent)
    (line,) = answer.out.splitlines()
    assert line.split()[0] == str(judged)
    assert line.endswith("not diagnosed")
    assert command("runs", judged.parent / "nowhere").code == 2
