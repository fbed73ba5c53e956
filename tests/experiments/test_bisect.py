"""`surefoot bisect` as a user types it: real scripts, real processes."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import forked
import patience
import without_landlock
from surefoot.experiments import processes as children

SOURCE = str(Path(__file__).parents[2] / "src")
BUDGETED = str(Path(__file__).parents[1] / "budgeted.py")
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
with open({0!r} + ".part", "w") as file:
    file.write(str(os.getpid()))
os.rename({0!r} + ".part", {0!r})
time.sleep(1e6)
"""

WRITES_HERE = ("--allow-writes", ".")
"""For scripts that tell the test something by a file in the real folder."""


def command(*arguments, over="never"):
    """The budget is used up when there is a file `over`."""
    return [sys.executable, BUDGETED, over, "bisect", "--budget", "100000", *arguments]


def bisect(folder, *arguments, **options):
    """The command is forked, and so are the runs that it starts."""
    return forked.run(command(*arguments, **options)[1:], cwd=folder, env=ENVIRONMENT, starts_forks=True)


def until_gone(process):
    """Wait for the end of a process that was killed and that nobody here has started: it may still need a moment."""
    patience.wait_until(lambda: not is_alive(process), lambda: f"process {process} is still there")


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
    return bisect(project, "--out", "healthy", "train.py", "0.05")


@pytest.fixture(scope="module")
def failing(project):
    return bisect(
        project,
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
    ended = healthy
    assert ended.returncode == 0, ended.stderr
    assert "The script does not fail: 80 steps, the loss fell to" in ended.stdout
    assert sorted(p.name for p in (project / "healthy").iterdir()) == ["baseline", "bisect.json", "findings.json"]
    assert "surefoot: baseline: fell to" in ended.stderr


def test_the_change_that_cures_is_named_and_confirms_the_cause(project, failing):
    ended = failing
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
    row = next(row for row in json.loads(failing.stdout)["runs"] if row["name"] == "eps")
    assert (row["applied"], row["verdict"]) == (False, "does not apply")
    assert row["why"] == "the optimizer has no eps"


def test_the_folder_holds_curves_and_findings_for_the_report(project, failing):
    kept = json.loads((project / "failing" / "bisect.json").read_text())
    assert kept["runs"] == json.loads(failing.stdout)["runs"]
    first = json.loads((project / "failing" / "findings.json").read_text())["findings"][0]
    assert first["cause"] == "lr.too-high"
    assert first["confidence"] > 0.9
    assert first["evidence"]["experiments"]["cured_by"] == ["lr-10"]


def test_the_scripts_own_files_are_untouched(project, healthy, failing):
    assert (project / "model.pt").read_text() == "precious"
    assert (project / "results" / "log.csv").read_text() == "precious"
    assert sorted(p.name for p in project.iterdir()) == ["failing", "healthy", "model.pt", "results", "train.py"]


def test_the_budget_ends_what_runs_and_lists_what_did_not(project):
    once, pid = project / "once", project / "pid"
    second_hangs = "".join(f"    {line}\n" for line in HANG.format(str(pid)).splitlines())
    second_hangs = f"import os\nif os.path.exists({str(once)!r}):\n{second_hangs}open({str(once)!r}, 'w')\n"
    (project / "hangs.py").write_text(second_hangs + TRAIN)
    ended = bisect(project, "--jobs", "1", "--json", "--only", "lr-3", *WRITES_HERE, "hangs.py", "3.0", over=str(pid))
    until_gone(int(pid.read_text()))
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
    ended = bisect(project, "--jobs", "1", "--out", "flaky", "--only", "lr-3", *WRITES_HERE, "flaky.py", "0")
    assert ended.returncode == 1
    assert "does not occur again when nothing is changed" in ended.stdout
    assert "not run: the failure does not occur again" in ended.stdout


def test_a_script_that_shows_nothing_is_ended_in_time(tmp_path):
    (tmp_path / "hang.py").write_text(HANG.format(str(tmp_path / "pid")))
    ended = bisect(tmp_path, *WRITES_HERE, "hang.py", over=str(tmp_path / "pid"))
    assert ended.returncode == 2
    assert "the script recorded nothing in " in ended.stderr
    until_gone(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_no_run_behind(tmp_path, number):
    (tmp_path / "hang.py").write_text(HANG.format(str(tmp_path / "pid")))
    process = subprocess.Popen(
        command(*WRITES_HERE, "hang.py"),
        cwd=tmp_path,
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    patience.wait_until((tmp_path / "pid").exists)
    process.send_signal(number)
    _, errors = process.communicate(timeout=patience.HANG_SECONDS)
    assert process.returncode == 128 + number
    assert b"Traceback" not in errors
    until_gone(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere.py"], "no script at nowhere.py"),
        (["--only", "magic", "train.py"], "no change 'magic'"),
        (["--budget", "0", "train.py"], "--budget"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_two(tmp_path, arguments, words):
    (tmp_path / "train.py").write_text("")
    ended = bisect(tmp_path, *arguments)
    assert ended.returncode == 2
    assert words in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def test_an_option_after_the_script_and_a_missing_confinement_are_reported(tmp_path):
    (tmp_path / "train.py").write_text("import torch\n")
    words = [without_landlock.__file__, *command("train.py", "--budget", "20")[1:]]
    ended = forked.run(words, cwd=tmp_path, env=ENVIRONMENT, starts_forks=True)
    assert "--budget comes after train.py and is passed to it" in ended.stderr
    assert ended.stderr.count("this system cannot confine the runs") == 1
    assert ended.returncode == 2


def test_a_run_that_prints_for_ever_does_not_fill_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(children, "LARGEST_OUTPUT", 1 << 20)
    work = tmp_path / "work"
    work.mkdir()
    (work / "train.py").write_text("while True:\n    print('x' * 10_000)\n")
    subject = children.Subject("train.py", folder=work)
    with children.Children(subject, tmp_path / "out", threads=1) as runs:
        child = runs.start("baseline", {})
        output = child.folder / children.OUTPUT
        for _ in range(2):  # what it prints later is counted anew
            patience.wait_until(lambda: output.stat().st_size > children.LARGEST_OUTPUT)
            os.killpg(child.process.pid, signal.SIGSTOP)
            os.waitpid(child.process.pid, os.WUNTRACED)
            child.shorten_output()
            assert output.stat().st_size == 0
            os.killpg(child.process.pid, signal.SIGCONT)
        patience.wait_until(lambda: output.stat().st_size > children.LARGEST_OUTPUT)
        os.killpg(child.process.pid, signal.SIGSTOP)
        os.waitpid(child.process.pid, os.WUNTRACED)
        assert runs.wait(until=0.0) is child
    assert output.stat().st_size == 0
