"""A run folder as the page reads it."""

import json

import pytest

import report_runs
from surefoot.errors import UsageError
from surefoot.record.rank_file import rank_folders
from surefoot.report.page.source import describe_rank, read_json, read_source


def test_a_run_is_read_with_its_tables_events_and_findings(tmp_path):
    source = read_source(report_runs.quiet(tmp_path / "run", steps=20))
    assert source.scalars.num_rows == 20
    assert source.run["script"] == "train.py"
    assert source.findings["verdict"] == "healthy"
    assert (list(source.ranks), source.experiments) == ([], None)


def test_of_several_ranks_the_first_is_read(tmp_path):
    for rank, steps in ((0, 10), (2, 30), (10, 40)):
        report_runs.quiet(tmp_path / f"rank{rank}", steps=steps)
    (tmp_path / "rank-x").mkdir()
    assert [path.name for path in rank_folders(tmp_path)] == ["rank0", "rank2", "rank10"]
    source = read_source(tmp_path)
    assert source.scalars.num_rows == 10
    assert [rank["name"] for rank in source.ranks] == ["rank0", "rank2", "rank10"]


def test_the_charts_are_those_of_the_rank_that_had_the_cause_first(tmp_path):
    for rank, steps in ((0, 10), (1, 30), (2, 20)):
        folder = report_runs.quiet(tmp_path / f"rank{rank}", steps=steps)
        if rank == 1:
            report_runs.write_findings(folder, {**report_runs.FINDING, "step": 4})
    source = read_source(tmp_path)
    assert source.folder == tmp_path
    assert source.findings["verdict"] == "broken"
    assert source.findings["findings"][0]["evidence"]["rank"] == 1
    assert source.scalars.num_rows == 30
    assert source.rank_table.ranks == [0, 1, 2]


def test_a_rank_is_described_by_its_main_finding(tmp_path):
    report_runs.write_findings(tmp_path, {**report_runs.FINDING, "severity": "info"}, report_runs.FINDING)
    assert describe_rank(tmp_path) == {
        "name": tmp_path.name,
        "verdict": "broken",
        "summary": "At a learning rate of 1 the loss rises.",
    }


def test_a_folder_of_bisect_is_its_baseline_with_the_experiments(tmp_path):
    report_runs.quiet(tmp_path / "baseline", steps=20)
    (tmp_path / "bisect.json").write_text(json.dumps({"runs": []}))
    source = read_source(tmp_path)
    assert (source.folder, source.experiments, source.scalars.num_rows) == (tmp_path, {"runs": []}, 20)


@pytest.mark.parametrize("text", ["", "[1]", "{", "3", "[" * 100_000])
def test_a_file_that_is_no_json_object_is_nothing(tmp_path, text):
    (tmp_path / "run.json").write_text(text)
    assert read_json(tmp_path / "run.json") is None


def test_an_empty_folder_is_refused_and_the_way_out_is_named(tmp_path):
    with pytest.raises(UsageError, match="`surefoot serve` waits"):
        read_source(tmp_path)
