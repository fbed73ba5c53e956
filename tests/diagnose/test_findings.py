"""The contract of `findings.json`, from real scripts: what others parse must be there, and be JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from surefoot.diagnose.catalogue import CATALOGUE
from surefoot.diagnose.findings import Diagnosis, Finding
from watched import CLASSES, LOOP, NET, VALUES

if TYPE_CHECKING:
    from watched import Nursery

START = CLASSES + "loss_of = F.cross_entropy\n"
SCRIPTS = {
    "healthy": (START, NET, LOOP),
    "broken": (START, NET.replace("nn.Linear(32, 3)", "nn.Linear(32, 3), nn.Softmax(-1)"), LOOP),
    "not finite": (START, "x[17, 3] = torch.nan", NET, LOOP),
    "crashed": (START, "y = y + 1", NET, LOOP),
    "without torch": ("print('nothing to see')",),
    "without training": (VALUES, "print(x.mean())"),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_findings_are_strict_json_in_the_form_of_the_contract(watch: Nursery, name: str) -> None:
    run = watch(*SCRIPTS[name])

    def refuse(word: str) -> Any:
        raise AssertionError(f"{word} is not JSON")

    text = (run.folder / "run" / "findings.json").read_text()
    content = json.loads(text, parse_constant=refuse)
    assert set(content) == {"schema", "verdict", "steps", "summary", "findings"}
    assert content["schema"] == 1
    assert content["verdict"] in ("healthy", "unstable", "broken", "unknown")
    assert content["summary"].endswith(".")
    for finding in content["findings"]:
        keys = {"cause", "severity", "confidence", "step", "where", "evidence", "summary", "fixes"}
        assert set(finding) == keys
        assert finding["cause"] in CATALOGUE
        assert finding["severity"] in ("error", "warning", "info")
        assert 0 < finding["confidence"] < 1
        assert finding["step"] is None or isinstance(finding["step"], int)
        assert all(isinstance(place, str) and place for place in finding["where"])
        assert finding["evidence"]
        assert finding["fixes"]
        assert finding["summary"].endswith(".")
        assert "None" not in finding["summary"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_folder_alone_gives_the_same_findings_again(watch: Nursery, name: str) -> None:
    run = watch(*SCRIPTS[name])
    written = json.loads((run.folder / "run" / "findings.json").read_text())
    again = run.diagnosis.as_json()
    assert again["verdict"] == written["verdict"]
    assert [f["cause"] for f in again["findings"]] == [f["cause"] for f in written["findings"]]
    assert [f["summary"] for f in again["findings"]] == [f["summary"] for f in written["findings"]]


def test_the_terminal_shows_the_first_finding_with_its_place_and_fix(watch: Nursery) -> None:
    run = watch(*SCRIPTS["broken"])
    words = " ".join(run.errors.split())
    place = run.first.where[0]
    line = f"{place.rpartition(':')[2]} | {' '.join(run.first.evidence['source'][place].split())}"
    assert f"error · {run.first.cause} · 0.97 {run.first.summary} At: step 0, {place} {line} Fix:" in words
    assert f"Fix: {run.first.fixes[0]}" in words


def test_a_crash_keeps_its_traceback_and_its_cause_is_named(watch: Nursery) -> None:
    run = watch(*SCRIPTS["crashed"])
    assert run.exit_code == 1
    assert "IndexError: Target 3 is out of bounds" in run.errors
    assert "surefoot/watch" not in run.errors
    assert run.first.cause == "data.label-out-of-range"
    assert run.first.step == 0
    assert run.at("loss = loss_of") in run.first.where


def test_a_diagnosis_is_printed_as_text_and_shown_as_html_in_a_notebook() -> None:
    finding = Finding("lr.too-high", "error", 0.9, "The loss <rises>.", step=1200, fixes=("Divide it by 10.", "Clip."))
    broken = Diagnosis("broken", 1500, (finding,))
    assert str(broken).splitlines()[:3] == ["broken · 1,500 steps", "", "  error · lr.too-high · 0.90"]
    shown = broken._repr_html_()
    assert all(each in shown for each in ("1,500 steps", "1,200", "The loss &lt;rises&gt;.", "Divide it by 10."))
    assert "Clip." not in shown
    healthy = Diagnosis("healthy", 1, (), reason="No fault was found in 1 step.")
    assert "1 step · No fault was found in 1 step." in healthy._repr_html_()
    assert "<table" not in healthy._repr_html_()
