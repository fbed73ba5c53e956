"""Rows, the sentence that sums them up, and the files for other programs."""

from __future__ import annotations

import io
import json
import math
from typing import Any

from surefoot.core.console import result_console
from surefoot.diagnose.findings import Diagnosis, Finding
from surefoot.experiments.results import Report, Row, sentence, show, thinned


def row(name, verdict, title=None):
    return Row(name, title or name, "cure", verdict)


def test_the_sentence_names_cures_and_the_others():
    rows = [row("lr-3", "cures", "LR / 3"), row("clip", "cures"), row("fp32", "does not"), row("eps", "not run")]
    assert sentence(rows) == "LR / 3 cures it; so does clip; fp32 does not; 1 was not run."
    assert (
        sentence([row("a", "does not"), row("b", "does not")])
        == "no single change that was tried cures it; a and b do not."
    )
    assert sentence([row("a", "cannot tell")]).endswith("unclear: a.")


def test_a_curve_is_thinned_to_its_extremes():
    losses = [(i, float(i % 10)) for i in range(5_000)]
    losses[2_500] = (2_500, math.nan)
    few = thinned(losses)
    assert len(few) <= 310
    assert any(math.isnan(value) for _, value in few)
    assert min(value for _, value in few if not math.isnan(value)) == 0.0
    assert thinned(losses[:10]) == losses[:10]


def test_the_files_hold_everything(tmp_path):
    diagnosis = Diagnosis("broken", 10, (Finding("lr.too-high", "error", 0.95, "so", 1, (), {}, ()),))
    report = Report(
        "cured",
        "LR / 3 cures it.",
        [row("baseline", "fails"), row("lr-3", "cures")],
        diagnosis,
        speaks_for=["clip.saturated"],
    )
    report.write(tmp_path)
    content = json.loads((tmp_path / "bisect.json").read_text())
    assert content["cures"] == report.cures == ["lr-3"]
    assert [run["applied"] for run in content["runs"]] == [False, True]
    assert json.loads((tmp_path / "findings.json").read_text())["findings"][0]["cause"] == "lr.too-high"


def test_a_sure_finding_leaves_no_room_for_guesses():
    sure = Finding("lr.too-high", "error", 0.95, "so", 1, (), {}, ())
    unsure = Finding("lr.too-high", "error", 0.5, "so", 1, (), {}, ())

    def guesses(finding):
        return Report("cured", "", [], Diagnosis("broken", 1, (finding,)), speaks_for=["x"]).guesses

    assert guesses(sure) == []
    assert guesses(unsure) == ["x"]


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
