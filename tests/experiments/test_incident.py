"""What is asked of the runs after an incident, and what is known of the run that it is from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from surefoot.experiments.incident import AppliedAsItWas, CapturedIncident, _AfterIncident, findings_near
from surefoot.experiments.plan import BY_NAME
from surefoot.experiments.run_comparison import RunReading
from surefoot.experiments.trials import REPEAT
from surefoot.record.facts import ExperimentFacts, FailingRows, RepeatedDraws, RunDescription, RunFacts

RISEN = RunReading("risen", 21, failed_at=104, words="rises", losses=[(100, 1.0)])
BROKEN = RunReading("non-finite", 1, failed_at=100, words="not finite", losses=[(100, 1.0)])


def captured(folder: Path = Path(), history: int = 30) -> CapturedIncident:
    rows = [{"step": i, "loss": 1.0, "skipped": False} for i in range(100 - history, 100)]
    facts: Any = {"step": 100, "signals": rows, "hardware": {"device": "cpu"}}
    return CapturedIncident(folder, facts)


def question(reading: RunReading) -> _AfterIncident:
    return _AfterIncident(AppliedAsItWas(captured(), reading, RunFacts(), 3.0))


def test_the_order_of_a_run_names_the_incident_and_the_change(tmp_path: Path) -> None:
    assert captured(tmp_path).order("clip", 12.0) == {
        "change": "clip",
        "incident": str(tmp_path.resolve()),
        "target": None,
        "follow": 20,
        "seconds": 12.0,
    }
    assert captured(history=3).level is None


def test_orders_carry_what_the_change_needs() -> None:
    later, at_once = question(RISEN), question(BROKEN)
    assert later.order(REPEAT, 100.0)["change"] is None
    assert later.order(BY_NAME["tiny-batch"], 100.0)["bar"] == 1.1
    assert at_once.order(BY_NAME["tiny-batch"], 100.0)["bar"] is None
    assert at_once.order(BY_NAME["other-seed"], 100.0)["draws"]
    assert not later.order(BY_NAME["other-seed"], 100.0)["draws"]
    assert later.order(BY_NAME["clip"], 7.0)["seconds"] == 7.0
    assert later.order(BY_NAME["clip"], 100.0)["skip_steps"] == [0]


def judged(change: str, facts: ExperimentFacts) -> Any:
    from surefoot.experiments.results import Row

    row = Row(change, change, "probe", "not run")
    question(BROKEN).judge(row, BY_NAME[change], RunFacts(experiment=facts), RunDescription())
    return row


def test_rows_and_draws_are_judged_by_what_the_run_recorded() -> None:
    draws = FailingRows(fails=True, draws=RepeatedDraws(random=True, tries=10, failed=4), done=True)
    row = judged("other-seed", ExperimentFacts(rows=draws))
    assert (row.verdict, row.draws) == ("tells", (4, 10))
    row = judged("tiny-batch", ExperimentFacts(rows=FailingRows(of=8, tries=4, fails=True, single=[2], done=True)))
    assert row.why == "row 2 alone fails (of the batch's 8, counted from 0)"
    assert judged("tiny-batch", ExperimentFacts()).verdict == "cannot tell"


def test_the_findings_of_the_run_are_read_without_what_a_terminal_obeys(tmp_path: Path) -> None:
    folder = tmp_path / "incidents" / "100"
    folder.mkdir(parents=True)
    assert findings_near(captured(folder)).findings == ()
    finding = {"cause": "data.bad-batch", "severity": "error", "confidence": 0.9, "summary": "\x1b[2Jgone"}
    whole = finding | {"step": 3, "where": ["a"], "evidence": {"k": "\x1b"}, "fixes": [], "newer": 1}
    content = {"schema": 1, "verdict": "broken", "steps": 100, "findings": [whole]}
    (tmp_path / "findings.json").write_text(json.dumps(content))
    (found,) = findings_near(captured(folder)).findings
    assert found.cause == "data.bad-batch"
    assert "\x1b" not in found.summary + found.evidence["k"]
