"""What is printed under the table: what the runs say, and what to do."""

from __future__ import annotations

import io
from typing import Any

from surefoot.core.console import result_console
from surefoot.diagnose.findings import Diagnosis, Finding
from surefoot.experiments.results import Report
from surefoot.experiments.terminal import show

FIX = "Clamp the argument: `log(x.clamp_min(1e-8))`."


def printed(*findings: Finding, folder: str = "runs/x", **more: Any) -> list[str]:
    report = Report("cured", "LR / 3 cures it.", [], Diagnosis("broken", 100, findings), **more)
    console = result_console()
    console.file = io.StringIO()
    show(report, folder, console)
    return [line.rstrip() for line in console.file.getvalue().splitlines() if line.strip()]


def finding(confidence: float, **experiments: bool) -> Finding:
    evidence = {"experiments": experiments} if experiments else {}
    return Finding("loss.undefined-op", "error", confidence, "log at line 25", evidence=evidence, fixes=(FIX, "…"))


def test_the_first_finding_says_what_to_do() -> None:
    other = Finding("lr.too-high", "warning", 0.5, "…", fixes=("Lower it.",))
    told = printed(finding(0.95), other)
    at = told.index("  loss.undefined-op · 0.95 · log at line 25")
    assert told[at + 1 : at + 4] == [
        f"    Fix: {FIX}",
        "    surefoot explain loss.undefined-op",
        "  lr.too-high · 0.50 · …",
    ]
    assert not any("Lower it" in line for line in told)


def test_the_fix_of_a_refuted_finding_is_not_advised() -> None:
    assert not any("Fix:" in line for line in printed(finding(0.45, refuted=True)))


def test_beside_a_finding_that_is_sure_no_cause_is_guessed() -> None:
    guess = "This suggests data.unshuffled."
    assert guess not in printed(finding(0.93), speaks_for=["data.unshuffled"])
    assert guess in printed(finding(0.8), speaks_for=["data.unshuffled"])
    assert guess in printed(finding(0.93, refuted=True), speaks_for=["data.unshuffled"])
    assert "    surefoot explain data.unshuffled" in printed(speaks_for=["data.unshuffled"])


def test_paths_and_names_are_printed_as_they_are() -> None:
    named = Finding("lr.too-high", "warning", 0.5, "layers[0].weight :100: [bold]", fixes=("Lower [lr] :x:",))
    told = printed(named, folder="runs/[bold]a:100:b")
    assert "  lr.too-high · 0.50 · layers[0].weight :100: [bold]" in told
    assert "    Fix: Lower [lr] :x:" in told
    assert told[-1].endswith("· runs/[bold]a:100:b")
