"""Whatever stands in findings.json, a finding has the fields of the contract."""

import pytest

from surefoot.diagnose.catalogue import CATALOGUE
from surefoot.report.page.diagnosis import findings_of, reason_of, serious, steps_of, verdict_of


def test_a_finding_gets_the_title_of_its_cause():
    (finding,) = findings_of({"findings": [{"cause": "lr.too-high", "severity": "error", "step": 3, "fixes": ["x"]}]})
    assert finding["title"] == CATALOGUE["lr.too-high"].title
    assert (finding["severity"], finding["step"], finding["fixes"]) == ("error", 3, ["x"])


@pytest.mark.parametrize(
    "strange",
    [
        {},
        {"cause": None, "severity": 7, "confidence": "high", "step": True, "where": 3, "evidence": 4, "fixes": None},
        {"cause": ["x"], "severity": ["error"], "confidence": 2, "step": float("nan"), "where": ["a", None]},
    ],
)
def test_strange_values_are_replaced(strange):
    (finding,) = findings_of({"findings": [strange]})
    assert finding["severity"] == "warning"
    assert finding["confidence"] is None
    assert finding["step"] is None
    assert isinstance(finding["evidence"], dict)
    assert all(isinstance(place, str) for place in finding["where"])


@pytest.mark.parametrize("value", [None, {}, {"findings": 3}, {"findings": ["x"]}, {"verdict": ["healthy"]}])
def test_what_is_no_diagnosis_has_no_findings_and_no_verdict(value):
    assert findings_of(value) == []
    assert (verdict_of(value), reason_of(value), steps_of(value)) == ("", "", None)


def test_a_verdict_without_a_serious_finding_has_a_reason():
    assert reason_of({"verdict": "unknown", "summary": "no step"}) == "no step"
    assert reason_of({"verdict": "healthy", "summary": "no fault"}) == "no fault"
    assert reason_of({"verdict": "broken", "summary": "the loss rises"}) == ""


def test_remarks_are_not_serious():
    findings = findings_of({"findings": [{"severity": "info"}, {"severity": "warning"}]})
    assert [finding["severity"] for finding in serious(findings)] == ["warning"]
