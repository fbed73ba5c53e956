"""`surefoot run --guard`: a step whose gradients are not finite leaves no trace, and the run says what was left out."""

import json
from pathlib import Path

import pytest
from running import python, surefoot

SCRIPT = Path(__file__).with_name("guarded_steps.py")


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    """Every kind of optimizer with two bad steps each, under the guard."""
    folder = tmp_path_factory.mktemp("guarded")
    return folder, surefoot(folder, "--guard", str(SCRIPT), "cpu")


def test_a_bad_step_leaves_no_trace_in_any_optimizer(guarded):
    _, ended = guarded
    assert ended.returncode == 0, ended.stderr[-2000:]
    told = json.loads(ended.stdout.splitlines()[-1])
    assert told["failed"] == {}
    assert told["cases"] >= 78


def test_the_guard_says_what_it_left_out_and_why(guarded):
    folder, ended = guarded
    told = json.loads((folder / "run" / "run.json").read_text())["guarded"]
    cases = json.loads(ended.stdout.splitlines()[-1])["cases"]
    assert told["left_out"] == 2 * (cases - 5)  # four cases are the scaler's overflows, and one gradient was mended
    assert told["not_guarded"] == {}
    assert (told["first"], told["last"] > 0, len(told["parameters"])) == (0, True, 20)
    words = f"surefoot: --guard checked {told['checked']} steps and left out {told['left_out']} (the first at step 0, "
    assert words in ended.stderr
    assert "not finite: the gradients of second.weight" in ended.stderr
    events = [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text().splitlines()]
    skips = [event for event in events if event["event"] == "skip"]
    assert skips[0]["summary"] == "the step was left out: the gradient of second.weight is not finite"
    found = json.loads((folder / "run" / "findings.json").read_text())
    assert found["verdict"] == "unstable"
    assert found["summary"].startswith(f"`--guard` left out {told['left_out']} of {told['checked']} steps, the first")


def test_without_a_bad_step_the_guard_changes_no_bit(tmp_path):
    plain = python(tmp_path, str(SCRIPT), "cpu", "healthy")
    watched = surefoot(tmp_path, "--guard", str(SCRIPT), "cpu", "healthy")
    assert plain.returncode == 0, plain.stderr[-2000:]
    assert json.loads(watched.stdout) == json.loads(plain.stdout)
    assert "steps and left out none" in watched.stderr
