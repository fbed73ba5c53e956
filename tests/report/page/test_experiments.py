"""The experiments of `surefoot bisect` on the page."""

import json

import pytest

import report_runs
from surefoot.report.page.experiments import experiments_of
from surefoot.report.page.html import write_report
from surefoot.report.page.payload import sections
from surefoot.report.page.source import read_source

RUNS = [
    {"name": "baseline", "title": "baseline", "verdict": "fails", "why": "not finite", "steps": 3, "final_loss": 1e30}
    | {"loss": [[0, 2.0], [1, 9.0], [2, 1e30], [3, "nan"]]},
    {"name": "repeat", "title": "repeat", "verdict": "fails", "steps": 3, "loss": [[0, 2.0]]},
    {"name": "clip", "title": "clip 1.0", "verdict": "does not", "steps": 50, "final_loss": 2.9, "loss": [[0, 2.0]]},
    {"name": "lr-10", "title": "LR / 10", "verdict": "cures", "steps": 50, "loss": [[0, 2.0], [50, 0.1]]},
    {"name": "fp32", "title": "fp32", "verdict": "does not apply", "why": "no autocast", "steps": 0, "loss": []},
]


def bisected(folder, runs=RUNS):
    report_runs.quiet(folder / "baseline")
    text = json.dumps({"schema": 1, "sentence": "LR / 10 cures it; clip 1.0 does not.", "runs": runs})
    (folder / "bisect.json").write_text(text)
    (folder / "findings.json").write_text(json.dumps({"schema": 1, "verdict": "broken", "findings": []}))
    return folder


def test_the_folder_of_a_bisection_is_the_baselines_report_with_every_change_tried(tmp_path):
    found = sections(read_source(bisected(tmp_path)))
    assert {"loss", "grad_norm"} <= {chart["id"] for chart in found["charts"]}
    assert found["head"]["verdict"] == "broken"
    assert found["experiments"]["sentence"].startswith("LR / 10 cures it")
    titles = [row["title"] for row in found["experiments"]["rows"]]
    assert titles == ["baseline", "clip 1.0", "LR / 10", "fp32"]


def test_the_title_is_the_script_as_it_was_named_and_not_its_copy(tmp_path):
    folder = bisected(tmp_path)
    report_runs.describe(folder / "baseline", script="/tmp/surefoot-bisect-x/baseline/shadow/train.py")
    held = json.loads((folder / "bisect.json").read_text())
    (folder / "bisect.json").write_text(json.dumps(held | {"script": "train.py"}))
    found = sections(read_source(folder))
    assert found["head"]["script"].startswith("train.py")
    assert ["script", "train.py"] in found["facts"]


def test_the_losses_lie_side_by_side_the_cure_next_to_the_run_as_it_was(tmp_path):
    chart = experiments_of({"runs": RUNS})["chart"]
    assert [series["name"] for series in chart["series"]] == ["baseline", "LR / 10", "clip 1.0"]
    assert chart["series"][1]["y"] == [2.0, 0.1]


@pytest.mark.parametrize("runs", [None, 3, [], [None], ["x"], [{"loss": 4}], [{"verdict": "cures", "loss": [[1]]}] * 3])
def test_a_file_that_makes_no_sense_costs_its_section_at_most(tmp_path, runs):
    assert write_report(bisected(tmp_path, runs)).stat().st_size > 50_000


def test_a_run_that_was_not_bisected_has_no_such_section(tmp_path):
    assert sections(read_source(report_runs.quiet(tmp_path / "run")))["experiments"] is None
