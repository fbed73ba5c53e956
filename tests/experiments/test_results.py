"""Rows, the sentence that sums them up, and the files for other programs."""

import json
import math

from surefoot.diagnose.findings import Diagnosis, Finding
from surefoot.experiments.results import Report, Row, sentence, thinned


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
