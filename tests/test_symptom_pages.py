"""The pages that begin with a symptom: their scripts, run by the command they name, print what the page shows."""

import re
from pathlib import Path

import pytest

import forked

SYMPTOMS = Path(__file__).parents[1] / "docs" / "symptoms"
WATCHED = ["loss-is-nan", "does-not-learn", "loss-spiked"]


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def words(text):
    """Without numbers, which depend on the version of torch, and without line breaks and the place of the run."""
    text = re.sub(r"\S*runs/train-[\d-]+", "RUN", text)
    return re.sub(r"[-+.,:\de]*\d[-+.,:\de]*", "#", text).split()


def confidences(text):
    """Each cause with its confidence, which follows from rules and does not depend on the version of torch."""
    return re.findall(r"^  \w+ · (\S+) · ([\d.]+)$", text, re.M)


@pytest.mark.parametrize("name", WATCHED)
def test_the_script_prints_what_the_page_shows(name, tmp_path):
    page = SYMPTOMS / f"{name}.md"
    (script,), (shown,) = blocks(page, "python"), blocks(page, "text")
    (tmp_path / "train.py").write_text(script)
    ended = forked.run(["-m", "surefoot", "run", "train.py"], cwd=tmp_path)
    assert ended.returncode == 0
    assert words(ended.stdout + ended.stderr) == words(shown)
    assert confidences(ended.stderr) == confidences(shown)


def test_a_killed_run_continues_and_prints_what_the_page_shows(tmp_path):
    page = SYMPTOMS / "killed-every-night.md"
    (script, _), (printed, listed) = blocks(page, "python"), blocks(page, "text")
    kill = "stabilizer.steps == 170 and os.kill(os.getpid(), 9)"
    killed = script.replace("stabilizer.step()", f"stabilizer.step(); {kill}")
    (tmp_path / "killed.py").write_text("import os\n" + killed)
    (tmp_path / "train.py").write_text(script)
    assert forked.run(["killed.py"], cwd=tmp_path).returncode == -9
    ended = forked.run(["train.py"], cwd=tmp_path)
    assert ended.returncode == 0
    assert words(ended.stderr + ended.stdout) == words(printed)
    command, _, output = listed.removeprefix("$ surefoot ").partition("\n")
    assert words(forked.run(["-m", "surefoot", *command.split()], cwd=tmp_path).stdout) == words(output)


def test_every_page_is_checked():
    assert {page.stem for page in SYMPTOMS.glob("*.md")} == {*WATCHED, "killed-every-night"}
