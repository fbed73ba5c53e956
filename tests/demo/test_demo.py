"""`surefoot demo` as a newcomer types it: real processes, a short run."""

import json
import math
import re
import shlex

import pytest

import forked

STEPS = 180  # as few as it takes


BARE = [
    "runs/demo/train.py",
    "--steps",
    str(STEPS),
    "--seed",
    "0",
    "--results",
    "runs/demo/bare/results.json",
    "--faults",
]


def demo(folder, *arguments):
    return surefoot(folder, "demo", *arguments)


def surefoot(folder, *arguments):
    return forked.run(["-m", "surefoot", *arguments], cwd=folder, env=forked.environment(COLUMNS="100"))


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    done = demo(folder, "--steps", str(STEPS))
    assert done.returncode == 0, done.stderr
    return folder, done


def results(folder, name):
    return json.loads((folder / "runs/demo" / name / "results.json").read_text())


@pytest.mark.long
def test_the_guarded_run_ends_near_the_clean_one_and_the_bare_run_is_lost(ended):
    folder, _ = ended
    clean, bare, guarded = (results(folder, name)["validation"] for name in ("clean", "bare", "guarded"))
    assert not math.isfinite(bare)
    assert clean < 2.6
    assert guarded < clean + 0.2


@pytest.mark.long
def test_all_runs_are_the_same_until_something_goes_wrong(ended):
    folder, _ = ended
    first = STEPS * 40 // 100
    clean, bare, guarded = (results(folder, name)["losses"][:first] for name in ("clean", "bare", "guarded"))
    assert clean == bare
    assert guarded == pytest.approx(clean, rel=1e-3)  # the two ways to clip round differently


@pytest.mark.long
def test_the_table_says_what_became_of_each_run(ended):
    folder, done = ended
    for name in ("clean", "bare", "guarded"):
        row = next(line for line in done.stdout.splitlines() if re.match(rf"\s*{name} ", line))
        assert f"{results(folder, name)['validation']:.3f}" in row
    assert "4 of 4" in done.stdout
    assert "3 steps skipped, 1 rollback" in done.stdout
    assert re.search(r"ms \([+-]\d+\.\d%\)", done.stdout)


@pytest.mark.long
def test_the_diagnosis_of_the_bare_run_names_the_step_and_line_of_the_typo(ended):
    _, done = ended
    after = done.stdout.split("surefoot: broken", 1)[1]
    assert "lr.schedule-broken" in after
    assert re.search(rf"At: step {STEPS * 55 // 100}, runs/demo/train.py:\d+", after)


@pytest.mark.long
def test_every_command_that_it_prints_works(ended):
    folder, done = ended
    printed = re.findall(r"(?:^|: )(?:  )?(surefoot (?:run --out|replay|report) .*)$", done.stdout, re.MULTILINE)
    assert [words.split()[1] for words in printed] == ["run", "replay", "report"]
    told = surefoot(folder, *shlex.split(printed[1])[1:])
    assert told.returncode == 0, told.stdout + told.stderr
    assert "reproduced bit for bit" in told.stdout
    assert "First bad operation" in told.stdout
    assert surefoot(folder, *shlex.split(printed[2])[1:]).returncode == 0
    again = shlex.split(printed[0])[1:]
    assert again == ["run", "--out", "runs/demo/bare", *BARE]  # as the demo itself has run it


@pytest.mark.long
def test_the_last_line_is_the_path_of_a_report(ended):
    folder, done = ended
    path = folder / done.stdout.splitlines()[-1]
    assert path.name == "report.html"
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")


@pytest.mark.long
def test_nothing_is_said_on_stderr(ended):
    _, done = ended
    assert done.stderr == ""


def test_a_folder_with_other_things_in_it_is_left_alone(tmp_path):
    (tmp_path / "bare").mkdir()
    (tmp_path / "thesis.txt").write_text("years of work")
    done = demo(tmp_path, "--out", str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "--out" in done.stderr
    assert (tmp_path / "bare").exists()


def test_too_few_steps_are_refused_in_one_line(tmp_path):
    done = demo(tmp_path, "--steps", "10")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())
