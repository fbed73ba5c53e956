"""The data of the page, from real run folders."""

import base64

import numpy as np
import pytest

import report_runs
import surefoot
from surefoot.errors import UsageError
from surefoot.record.messages import LayerRows, StepRow
from surefoot.report.page.maps import MISSING, MOST_COLUMNS, NONE, NONFINITE, ZERO, time_columns
from surefoot.report.page.payload import sections
from surefoot.report.page.source import read_source


@pytest.fixture(scope="module")
def rough(tmp_path_factory):
    return report_runs.rough(tmp_path_factory.mktemp("runs") / "rough")


def of(folder):
    return sections(read_source(folder))


def chart(found, identity):
    return next(chart for chart in found["charts"] if chart["id"] == identity)


def codes(a_map):
    cells = np.frombuffer(base64.b64decode(a_map["cells"]), dtype="<u2")
    return cells.reshape(len(a_map["rows"]), len(a_map["columns"]))


def test_a_run_with_two_parts_has_a_series_for_each(rough):
    loss = chart(of(rough), "loss")
    assert [(series["part"], series["role"]) for series in loss["series"]] == [
        ("generator", "raw"),
        ("generator", "smooth"),
        ("discriminator", "raw"),
        ("discriminator", "smooth"),
    ]
    values = dict(zip(loss["series"][0]["x"], loss["series"][0]["y"], strict=True))
    assert values[120] == 10**20 or values[120] == 1e20
    assert values[200] == "nan"


def test_the_norm_that_clipping_left_is_the_limit(rough):
    clipped = [series for series in chart(of(rough), "grad_norm")["series"] if series["role"] == "clipped"]
    assert len(clipped) == 2
    assert np.allclose([value for series in clipped for value in series["y"]], 1.0)


def test_a_number_that_never_changes_is_said_instead_of_drawn(tmp_path):
    found = of(report_runs.quiet(tmp_path / "run"))
    assert chart(found, "lr")["flat"] == 0.001
    assert "flat" not in chart(found, "loss")


def test_what_was_not_recorded_has_no_section(tmp_path):
    found = of(report_runs.quiet(tmp_path / "run"))
    assert found["maps"] == []
    assert found["histograms"] is None
    assert found["device"] == []
    assert {chart["id"] for chart in found["charts"]} == {"loss", "grad_norm", "lr"}


def test_a_cell_that_was_not_finite_and_one_that_was_zero_have_codes_of_their_own(tmp_path):
    with surefoot.RunLog(tmp_path) as log:
        log.take(StepRow(step=0, time=0.0, loss=1.0))
        for step, norms in [(0, [1.0, 0.0]), (5, [float("nan"), 1e3])]:
            log.take(LayerRows(step, ["a", "b"], {"grad_norm": np.array(norms)}))
    (norms,) = of(tmp_path)["maps"]
    cells = codes(norms)
    assert norms["rows"] == ["a", "b"]
    assert norms["columns"] == [0, 5]
    assert cells[0].tolist() == [0, NONFINITE]
    assert cells[1].tolist() == [ZERO, 65_000]
    assert 10 ** norms["high"] == pytest.approx(1e3)


def test_a_parameter_without_a_gradient_is_neither_zero_nor_nan(tmp_path):
    with surefoot.RunLog(tmp_path) as log:
        for step, norms, odd in [(0, [None, 1.0, None], [None, 0, None]), (5, [1.0, 0.0, None], [0, 0, None])]:
            columns = {"grad_norm": norms, "nonfinite": odd, "param_norm": [1.0, 1.0, 1.0]}
            log.take(LayerRows(step, ["late", "zero", "never"], columns))
    table = surefoot.load_run(tmp_path).layers
    assert table.column("grad_norm").null_count == 3
    (norms,) = of(tmp_path)["maps"]
    cells = codes(norms)
    assert norms["rows"] == ["late", "zero", "never"]
    assert cells[0].tolist()[0] == NONE
    assert cells[1].tolist()[1] == ZERO
    assert cells[2].tolist() == [NONE, NONE]


def test_a_parameter_that_leaves_zero_is_no_trouble_and_one_that_bursts_is(tmp_path):
    with surefoot.RunLog(tmp_path / "run", device_seconds=None) as log:
        columns = {"param_norm": [1e-3, np.inf, 1.0], "update_ratio": [np.inf, np.inf, 1e-3]}
        log.take(LayerRows(0, ["bias", "burst", "weight"], columns))
    (found,) = of(tmp_path / "run")["maps"]
    assert found["rows"] == ["burst", "weight"]
    assert np.frombuffer(base64.b64decode(found["cells"]), dtype=np.uint16).tolist()[0] == NONFINITE


def test_a_layer_that_was_not_measured_at_a_step_is_missing_there(rough):
    maps = {a_map["id"]: a_map for a_map in of(rough)["maps"]}
    assert set(maps) == {"grad_norm", "update_ratio", "dead_share"}
    assert len(maps["dead_share"]["rows"]) == 4
    assert not (codes(maps["grad_norm"]) == MISSING).any()
    assert (codes(maps["grad_norm"]) == NONFINITE).sum() == 1


def test_many_steps_share_columns_and_every_column_begins_at_or_before_its_steps():
    steps = np.sort(np.random.default_rng(0).integers(0, 1_000_000, 20_000))
    starts, columns = time_columns(steps)
    assert len(starts) <= MOST_COLUMNS
    assert (starts[columns] <= steps).all()
    assert (np.append(starts[1:], 10**9)[columns] > steps).all()


def test_histograms_keep_every_value_and_count_what_is_not_finite(rough):
    histograms = of(rough)["histograms"]
    item = histograms["items"][0]
    cells = np.frombuffer(base64.b64decode(item["cells"]), dtype=np.uint8).reshape(item["bins"], -1)
    assert len(histograms["edges"][item["kind"]]) == item["bins"] + 1
    assert sorted(histograms["edges"][item["kind"]]) == histograms["edges"][item["kind"]]
    assert np.allclose(cells.sum(axis=0), 255, atol=item["bins"])
    assert item["odd"]["nan"][item["columns"].index(200)] == 7


def test_events_speak_where_nobody_diagnosed(rough):
    found = of(rough)
    assert found["findings"] == []
    assert [card["title"] for card in found["event_cards"]] == ["1 rollback", "3 steps were skipped", "1 loss spike"]
    assert found["head"]["headline"] == "1 rollback, 3 steps were skipped"
    assert found["head"]["tone"] == "unstable"


def test_findings_speak_first(tmp_path):
    folder = report_runs.quiet(tmp_path / "run")
    report_runs.write_findings(folder, report_runs.FINDING)
    head = of(folder)["head"]
    assert (head["verdict"], head["headline"]) == ("broken", "At a learning rate of 1 the loss rises")
    assert head["lead"] == "First fix: Divide the rate by 10: `lr=0.1`."


def test_a_healthy_run_says_so(tmp_path):
    head = of(report_runs.quiet(tmp_path / "run"))["head"]
    assert (head["verdict"], head["state"]) == ("healthy", "finished")
    assert head["lead"].startswith("The loss fell from 2.")


def test_device_readings_lie_at_the_step_that_was_running(rough):
    charts = {chart["id"]: chart for chart in of(rough)["device"]}
    assert charts["host-memory"]["series"][0]["x"] == list(range(0, 400, 10))
    assert charts["temperature"]["flat"] == 60


def test_a_run_that_never_took_a_step_has_a_page(tmp_path):
    report_runs.describe(tmp_path, exit_code=1, error="ValueError: no data")
    found = of(tmp_path)
    assert found["head"]["state"] == "failed"
    assert {"name": "exit status", "value": "ValueError: no data", "bad": True} in found["head"]["tiles"]
    assert (found["head"]["steps"], found["charts"], found["maps"]) == (0, [], [])


def test_of_several_ranks_the_first_is_shown_and_the_others_are_reported(tmp_path):
    for rank, verdict in ((0, "healthy"), (1, "broken"), (10, "healthy"), (2, "unstable")):
        report_runs.write_findings(report_runs.quiet(tmp_path / f"rank{rank}", steps=20), verdict=verdict)
    head = of(tmp_path)["head"]
    assert [(rank["name"], rank["verdict"]) for rank in head["ranks"]] == [
        ("rank0", "healthy"),
        ("rank1", "broken"),
        ("rank2", "unstable"),
        ("rank10", "healthy"),
    ]


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.mkdir()])
def test_what_is_no_run_folder_is_refused_with_the_way_out(tmp_path, make):
    make(tmp_path / "nothing")
    with pytest.raises(UsageError, match="nothing"):
        read_source(tmp_path / "nothing")
