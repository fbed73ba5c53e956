"""`surefoot bisect` as a user types it: real scripts, real processes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from surefoot.diagnose.experiments import children

SOURCE = str(Path(__file__).parents[3] / "src")
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": SOURCE}

TRAIN = """
import sys
import torch
from torch import nn
torch.manual_seed(0)
x = torch.randn(256, 8)
y = x[:, :1] + 0.5 * x[:, 1:2]
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[1]))
for step in range(80):
    rows = torch.randint(256, (32,))
    loss = nn.functional.mse_loss(model(x[rows]), y[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
torch.save(model.state_dict(), "model.pt")
open("results/log.csv", "a").write("done")
"""
HANG = """
import os, time
open({!r}, "w").write(str(os.getpid()))
time.sleep(600)
"""


def command(*arguments):
    return [sys.executable, "-m", "surefoot", "bisect", *arguments]


def bisect(folder, *arguments):
    began = time.monotonic()
    ended = subprocess.run(
        command(*arguments), cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=600
    )
    return ended, time.monotonic() - began


def is_alive(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("project")
    (folder / "train.py").write_text(TRAIN)
    (folder / "results").mkdir()
    (folder / "results" / "log.csv").write_text("precious")
    (folder / "model.pt").write_text("precious")
    return folder


@pytest.fixture(scope="module")
def healthy(project):
    return bisect(project, "--budget", "500", "--out", "healthy", "train.py", "0.05")


@pytest.fixture(scope="module")
def failing(project):
    return bisect(
        project,
        "--budget",
        "500",
        "--jobs",
        "2",
        "--out",
        "failing",
        "--only",
        "lr-10,eps",
        "--json",
        "train.py",
        "3.0",
    )


def test_a_healthy_script_needs_no_curing_and_no_experiments(project, healthy):
    ended, _ = healthy
    assert ended.returncode == 0, ended.stderr
    assert "Nothing needs curing: 80 steps, the loss fell to" in ended.stdout
    assert sorted(p.name for p in (project / "healthy").iterdir()) == ["baseline", "bisect.json", "findings.json"]
    assert "surefoot: baseline: fell to" in ended.stderr


def test_the_change_that_cures_is_named_and_confirms_the_cause(project, failing):
    ended, _ = failing
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout)
    assert (told["schema"], told["answer"], told["cures"]) == (1, "cured", ["lr-10"])
    assert told["sentence"] == "LR / 10 cures it."
    assert told["confirms"] == ["lr.too-high"]
    rows = {row["name"]: row for row in told["runs"]}
    assert list(rows) == ["baseline", "repeat", "lr-10", "eps"]
    assert (rows["baseline"]["outcome"], rows["repeat"]["verdict"]) == ("non-finite", "fails")
    assert rows["baseline"]["loss"][:3] == rows["repeat"]["loss"][:3]
    assert (rows["lr-10"]["outcome"], rows["lr-10"]["applied"], rows["lr-10"]["steps"]) == ("learned", True, 80)
    assert rows["lr-10"]["loss"][-1][1] < 0.1


def test_a_change_that_does_not_apply_says_so(failing):
    row = next(row for row in json.loads(failing[0].stdout)["runs"] if row["name"] == "eps")
    assert (row["applied"], row["verdict"]) == (False, "does not apply")
    assert row["why"] == "the optimizer has no eps"


def test_the_folder_holds_curves_and_findings_for_the_report(project, failing):
    kept = json.loads((project / "failing" / "bisect.json").read_text())
    assert kept["runs"] == json.loads(failing[0].stdout)["runs"]
    first = json.loads((project / "failing" / "findings.json").read_text())["findings"][0]
    assert first["cause"] == "lr.too-high"
    assert first["confidence"] > 0.9
    assert first["evidence"]["experiments"]["cured_by"] == ["lr-10"]


def test_the_scripts_own_files_are_untouched(project, healthy, failing):
    assert (project / "model.pt").read_text() == "precious"
    assert (project / "results" / "log.csv").read_text() == "precious"
    assert sorted(p.name for p in project.iterdir()) == ["failing", "healthy", "model.pt", "results", "train.py"]


def test_the_budget_ends_what_runs_and_lists_what_did_not(project, healthy):
    once = project / "once"
    second_hangs = f"import os, time\nif os.path.exists({str(once)!r}): time.sleep(600)\nopen({str(once)!r}, 'w')\n"
    (project / "hangs.py").write_text(second_hangs + TRAIN)
    budget = 3 * healthy[1]
    ended, took = bisect(project, "--budget", str(budget), "--jobs", "1", "--json", "--only", "lr-3", "hangs.py", "3.0")
    assert took < budget + 0.5 * healthy[1] + 2
    rows = {row["name"]: (row["verdict"], row["why"]) for row in json.loads(ended.stdout)["runs"]}
    assert rows["repeat"] == ("not run", "budget")
    assert rows["lr-3"] == ("not run", "budget")
    assert ended.returncode == 1


def test_a_failure_that_does_not_come_again_cannot_be_cured(project):
    once = project / "failed"
    rate = (
        f"import os, sys\nsys.argv[1] = '0.05' if os.path.exists({str(once)!r}) else '3.0'\nopen({str(once)!r}, 'w')\n"
    )
    (project / "flaky.py").write_text(rate + TRAIN)
    ended, _ = bisect(project, "--jobs", "1", "--out", "flaky", "--only", "lr-3", "flaky.py", "0")
    assert ended.returncode == 1
    assert "does not come again when nothing is changed" in ended.stdout
    assert "not run: the failure does not come again" in ended.stdout


def test_a_script_that_shows_nothing_is_ended_in_time(tmp_path):
    (tmp_path / "hang.py").write_text(HANG.format(str(tmp_path / "pid")))
    ended, _ = bisect(tmp_path, "--budget", "6", "hang.py")
    assert ended.returncode == 2
    assert "the script showed nothing in 4 s" in ended.stderr
    assert not is_alive(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_no_run_behind(tmp_path, number):
    (tmp_path / "hang.py").write_text(HANG.format(str(tmp_path / "pid")))
    process = subprocess.Popen(
        command("hang.py"), cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    until = time.monotonic() + 60
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < until
        time.sleep(0.05)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert b"Traceback" not in errors
    assert not is_alive(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere.py"], "no script at nowhere.py"),
        (["--only", "magic", "train.py"], "no change called 'magic'"),
        (["--budget", "0", "train.py"], "--budget"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_two(tmp_path, arguments, words):
    (tmp_path / "train.py").write_text("")
    ended, _ = bisect(tmp_path, *arguments)
    assert ended.returncode == 2
    assert words in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def test_an_option_after_the_script_is_said_to_be_the_scripts(tmp_path):
    (tmp_path / "train.py").write_text("import torch\n")
    ended, _ = bisect(tmp_path, "train.py", "--budget", "20")
    assert "--budget comes after train.py and is given to it" in ended.stderr
    assert ended.returncode == 2


def test_a_run_that_prints_for_ever_does_not_fill_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(children, "LARGEST_OUTPUT", 1 << 20)
    work = tmp_path / "work"
    work.mkdir()
    (work / "train.py").write_text("while True:\n    print('x' * 10_000)\n")
    subject = children.Subject("train.py", folder=work)
    with children.Children(subject, tmp_path / "out", threads=1) as runs:
        child = runs.start("baseline", {})
        runs.wait(until=time.monotonic() + 5)
    assert (child.folder / children.OUTPUT).stat().st_size < 100 << 20
