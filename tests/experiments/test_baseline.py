"""What the unchanged script left, and whether experiments make sense on it."""

import json
from types import SimpleNamespace

import pytest

from surefoot.diagnose.findings import Diagnosis, Finding
from surefoot.errors import UsageError
from surefoot.experiments.baseline import Baseline, usable_facts
from surefoot.experiments.run_comparison import RunReading
from surefoot.record.facts import RunFacts


def child(folder, facts=None, **run):
    if facts is not None:
        (folder / "facts.json").write_text(json.dumps(facts))
        (folder / "run.json").write_text(json.dumps({"exit_code": 0, **run}))
    return SimpleNamespace(folder=folder, seconds=3.0)


FACTS = {"backwards": 5, "experiment": {"ended": ""}}


def test_facts_of_a_run_that_trained_are_used(tmp_path):
    facts, description = usable_facts(child(tmp_path, FACTS))
    assert facts.backwards == 5
    assert description.exit_code == 0


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        (None, "recorded nothing in 3 s"),
        ({"backwards": 1}, "without importing torch"),
        ({**FACTS, "backwards": 0}, "never called backward"),
        ({**FACTS, "experiment": {"refused": "/data"}}, "writes to /data"),
        ({**FACTS, "experiment": {"problem": "no incident"}}, "no incident"),
        ({**FACTS, "crash": {"type": "PermissionError", "message": "denied"}}, "--allow-writes"),
        ({**FACTS, "crash": {"type": "UsageError", "message": "wrong flag"}}, "wrong flag"),
    ],
)
def test_a_script_that_cannot_be_experimented_with_is_wrong_use(tmp_path, facts, message):
    with pytest.raises(UsageError, match=message):
        usable_facts(child(tmp_path, facts))


def baseline(reading, *findings, cut_short=False):
    return Baseline(reading, Diagnosis("broken", 10, findings), RunFacts.from_json(FACTS), 1.0, cut_short)


def test_why_no_experiment_could_cure_it():
    assert baseline(RunReading("diverged", 10)).why_not == ""
    assert "does not fail" in baseline(RunReading("learned", 10)).why_not
    assert "too short to judge" in baseline(RunReading("too short", 2), cut_short=True).why_not
    assert "its share of the budget" in baseline(RunReading("too short", 2), cut_short=True).why_not
    assert "no change to the training" in baseline(RunReading("crashed", 2, crash="KeyError: 'x'")).why_not


def test_the_fixes_of_the_first_finding_that_a_change_would_fix():
    unknown = Finding("data.leakage", "error", 0.9, "", 0, (), {}, ())
    known = Finding("lr.too-high", "error", 0.9, "", 0, (), {}, ())
    assert "lr-10" in baseline(RunReading("diverged", 10), unknown, known).likely_fixes
    assert baseline(RunReading("diverged", 10), unknown).likely_fixes == {}
