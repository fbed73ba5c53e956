"""Checks and the examination that holds them."""

import json
import math

import pytest

from surefoot.diagnose.catalogue import CATALOGUE
from surefoot.diagnose.findings import Finding
from surefoot.doctor.checks import Check, Examination, failed, from_finding, passed, skipped, warned

CAUSE = "loss.broadcast"


def test_the_worst_status_counts_and_failures_name_their_causes_first():
    checks = (
        passed(1, "one", "fine", 1.0),
        warned(2, "two", "hm", 2.0, "less", "Do.", "data.unshuffled"),
        from_finding(3, "three", Finding(cause=CAUSE, severity="error", confidence=0.9, summary="bad"), "equal shapes"),
        skipped(4, "four", "no optimizer"),
    )
    examination = Examination(checks, 1.25, ("A note.",))
    assert examination.status == "fail"
    assert not examination.ok
    assert examination.causes == (CAUSE, "data.unshuffled")
    assert examination.counts() == {"fail": 1, "warn": 1, "pass": 1, "skipped": 1}
    assert examination.verdict == "1 fail, 1 warn, 1 pass, 1 skipped · 1.2 s"
    assert examination["three"].fix == CATALOGUE[CAUSE].fixes[0]
    assert "A note." in str(examination)


def test_json_has_no_numbers_that_are_not_finite():
    checks = (failed(1, "one", "bad", math.nan, "finite", "Do."), passed(2, "two", "fine", math.inf))
    content = json.loads(json.dumps(Examination(checks, 0.0).to_dict(), allow_nan=False))
    assert [check["number"] for check in content["checks"]] == ["nan", "inf"]


def test_a_finding_is_presented_with_its_number_and_the_first_fix():
    finding = Finding(CAUSE, "error", 0.9, "they differ", 0, (), {"shape": [1, 2], "pairs": 64}, ("Elsewhere.",))
    check = from_finding(2, "shape", finding, "equal shapes")
    assert (check.status, check.cause, check.number, check.summary) == ("fail", CAUSE, 64.0, "they differ")
    assert check.fix == CATALOGUE[CAUSE].fixes[0]
    warning = from_finding(2, "shape", Finding(CAUSE, "warning", 0.9, "so", 0, (), {}, ()), "equal shapes")
    assert (warning.status, warning.number) == ("warn", None)


def test_a_cause_must_be_in_the_catalogue():
    with pytest.raises(ValueError, match="not a code of the catalogue"):
        Check(1, "name", "fail", "summary", cause="made.up")
