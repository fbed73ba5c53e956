"""Several ranks are one run: one verdict, the cause from the rank that had it first, the rest as its consequences."""

from __future__ import annotations

import json
import shutil

import pytest

from ranked import MadeRank, prints, write_ranks, write_run
from recorded import facts_of
from surefoot.diagnose.engine import diagnose_folder
from surefoot.diagnose.findings import Diagnosis, Finding
from surefoot.diagnose.merged import JUDGED_AGAIN, RankDiagnosis, finding_of, merge
from surefoot.errors import UsageError


def finding(cause, severity="error", step=None, confidence=0.9):
    return Finding(
        cause, severity, confidence, f"{cause} happened.", step, ("fc.weight",), {"figure": 1.0}, ("Fix it.",)
    )


def rank(number, *findings, verdict=None, reason=""):
    worst = {each.severity for each in findings}
    said = verdict or ("broken" if "error" in worst else "unstable" if "warning" in worst else "healthy")
    return RankDiagnosis(number, Diagnosis(said, 100, tuple(findings), reason))


def causes(diagnosis):
    return [each.cause for each in diagnosis.serious]


def test_a_cause_that_all_ranks_have_is_stated_once():
    merged = merge([rank(n, finding("optim.parameters-missing")) for n in range(4)], [], 4)
    assert causes(merged) == ["optim.parameters-missing"]
    assert "rank" not in merged.findings[0].evidence
    assert merged.verdict == "broken"


def test_the_cause_is_that_of_the_rank_which_had_it_first():
    merged = merge([rank(0, finding("lr.too-high", step=21)), rank(1, finding("data.nonfinite-input", step=20))], [], 2)
    assert causes(merged) == ["data.nonfinite-input"]
    assert merged.findings[0].evidence["rank"] == 1
    assert merged.findings[0].where[0] == "rank 1"
    assert merged.summary.startswith("On rank 1: ")
    consequence = next(each for each in merged.findings if each.cause == "lr.too-high")
    assert consequence.severity == "info"
    assert "followed data.nonfinite-input on rank 1" in consequence.summary


def test_at_the_same_step_the_stronger_evidence_is_the_cause():
    merged = merge([rank(0, finding("lr.too-high", step=20)), rank(1, finding("data.nonfinite-input", step=20))], [], 2)
    assert causes(merged) == ["data.nonfinite-input"]


def test_at_the_same_step_a_cause_that_explains_the_other_is_the_cause():
    ranks = [rank(0, finding("loss.undefined-op", step=20)), rank(1, finding("data.nonfinite-input", step=20))]
    assert causes(merge(ranks, [], 2)) == ["data.nonfinite-input"]


def test_the_rank_that_knows_more_about_a_nan_of_the_same_step_is_the_one_that_had_it():
    unsure = finding("loss.undefined-op", step=30, confidence=0.5)
    merged = merge([rank(0, unsure), rank(1, finding("loss.undefined-op", step=30, confidence=0.93))], [], 2)
    assert causes(merged) == ["loss.undefined-op"]
    assert merged.findings[0].confidence == 0.93
    assert merged.findings[0].evidence["rank"] == 1
    assert merged.summary.startswith("On rank 1: ")


def test_a_rate_that_is_too_high_on_all_ranks_is_not_that_of_the_most_certain_one():
    found = [finding("lr.too-high", step=10, confidence=each) for each in (0.5, 0.9)]
    merged = merge([rank(number, each) for number, each in enumerate(found)], [], 2)
    assert "rank" not in merged.findings[0].evidence


def test_ranks_that_only_saw_another_one_leave_are_a_consequence():
    left = finding("dist.collective-failed", step=4)
    merged = merge([rank(0, left), rank(1, finding("data.label-out-of-range", step=4)), rank(2, left)], [], 3)
    assert causes(merged) == ["data.label-out-of-range"]


def test_a_failed_collective_without_another_cause_is_the_cause():
    merged = merge([rank(0, finding("dist.collective-failed", step=4)), rank(1)], [], 2)
    assert causes(merged) == ["dist.collective-failed"]


def test_what_one_rank_has_before_the_first_cause_of_another_stays():
    merged = merge(
        [rank(0, finding("clip.saturated", "warning", 2)), rank(1, finding("loss.broadcast", step=1))], [], 2
    )
    assert causes(merged) == ["loss.broadcast"]
    merged = merge(
        [rank(0, finding("clip.saturated", "warning", 2)), rank(1, finding("loss.broadcast", step=5))], [], 2
    )
    assert set(causes(merged)) == {"clip.saturated"}


def test_healthy_ranks_are_a_healthy_run():
    merged = merge([rank(0), rank(1)], [], 2)
    assert merged.verdict == "healthy"
    assert merged.summary == "No fault was found in 100 steps on each of 2 ranks."


def test_a_rank_that_cannot_be_judged_makes_the_run_unknown_and_is_named():
    merged = merge([rank(0), rank(1, verdict="unknown", reason="Too short to judge.")], [], 2)
    assert merged.verdict == "unknown"
    assert merged.summary == "Rank 1: Too short to judge."


def test_a_rank_that_is_missing_makes_the_run_unknown():
    merged = merge([rank(0)], [], 2)
    assert merged.verdict == "unknown"
    assert "1 of 2 ranks" in merged.summary


# ---- folders --------------------------------------------------------------------------------------------------------


def run_of(tmp_path, count, odd=None):
    for number in range(count):
        looks = {step: {"parameters": prints(9, 9, 9)} for step in (3, 5, 8, 12)} if number == odd else {}
        write_ranks(tmp_path, MadeRank(number, count, looks=looks))
        write_run(tmp_path / f"rank{number}", facts_of())
    return tmp_path


def test_the_folder_of_several_ranks_is_judged_as_one_run(tmp_path):
    diagnosis = diagnose_folder(run_of(tmp_path, 3, odd=1))
    assert diagnosis.findings[0].cause == "dist.replicas-diverged"
    assert diagnosis.findings[0].evidence["ranks"] == [1]
    assert diagnosis.verdict == "broken"


def test_a_finding_of_the_comparison_has_the_lines_of_the_script(tmp_path):
    for number, rate in enumerate((0.1, 0.1, 0.3)):
        write_ranks(tmp_path, MadeRank(number, 3, looks={-1: {"lr": [rate]}}))
        write_run(tmp_path / f"rank{number}", facts_of(source_lines={"train.py:9": "optimizer = AdamW(...)"}))
    first = diagnose_folder(tmp_path).findings[0]
    assert first.cause == "dist.config-disagrees"
    assert first.evidence["source"] == {"train.py:9": "optimizer = AdamW(...)"}


def test_a_rank_that_left_no_folder_is_missed(tmp_path):
    shutil.rmtree(run_of(tmp_path, 3) / "rank2")
    diagnosis = diagnose_folder(tmp_path)
    assert (diagnosis.verdict, diagnosis.summary) == ("unknown", "Only 2 of 3 ranks have been recorded.")


def test_the_findings_of_many_ranks_are_read_as_they_were_written(tmp_path):
    count = JUDGED_AGAIN + 2
    run_of(tmp_path, count)
    for number in range(count):
        (tmp_path / f"rank{number}" / "facts.json").write_text("{") if number else None
        held = rank(number, *([finding("lr.too-low", "warning", 3)] if number == 5 else [])).diagnosis
        (tmp_path / f"rank{number}" / "findings.json").write_text(json.dumps(held.as_json()))
    diagnosis = diagnose_folder(tmp_path)
    assert [each.cause for each in diagnosis.serious] == ["lr.too-low"]
    assert diagnosis.findings[0].evidence["rank"] == 5


def test_a_finding_is_read_back_as_it_was_written():
    made = finding("lr.too-high", step=7)
    assert finding_of(json.loads(json.dumps(made.as_json()))) == made


def test_ranks_that_left_nothing_are_an_error_that_says_so(tmp_path):
    (tmp_path / "rank0").mkdir()
    with pytest.raises(UsageError, match="none of them has been recorded"):
        diagnose_folder(tmp_path)
