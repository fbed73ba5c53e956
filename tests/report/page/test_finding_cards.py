"""Findings and events in a real browser: lines of the script, the height of the loss chart, the order of events."""

import json

import pytest

import report_runs
import surefoot
from surefoot.record.messages import StepRow
from surefoot.report.page.compare import write_comparison
from surefoot.report.page.html import write_report

pytestmark = pytest.mark.browser

SOURCE = {
    "train.py:9": "    for x in data:  # every batch",
    "train.py:10": "        loss = f(x, 'sum')",
    "train.py:12": "        loss.backward()",
    "train.py:300": "print(<b>loss</b>)",
    "other.py:4": "x = 1",
}


def opened(open_page, folder, where, width=1400, **fields):
    finding = {**report_runs.FINDING, "where": where, "evidence": {"source": SOURCE}, **fields}
    report_runs.write_findings(folder, finding)
    return open_page(write_report(folder), viewport={"width": width, "height": 900}).page


def test_a_finding_shows_the_lines_around_its_place(open_page, tmp_path):
    page = opened(open_page, report_runs.rough(tmp_path / "run"), ["train.py:10", "train.py:300", "0.weight"])
    blocks = page.locator(".card.first .source")
    assert [block.locator("figcaption").inner_text() for block in blocks.all()] == ["train.py", "train.py"]
    assert blocks.first.locator(".line").all_text_contents() == [
        " 9for x in data:  # every batch",
        "10    loss = f(x, 'sum')",
        "11",
        "12    loss.backward()",
    ]
    assert blocks.first.locator(".named .number").inner_text() == "10"
    assert blocks.nth(1).locator(".line").text_content() == "300print(<b>loss</b>)"  # text, not HTML
    kinds = {kind: blocks.first.locator(f".{kind}").all_text_contents() for kind in ("keyword", "string", "comment")}
    assert kinds == {"keyword": ["for", "in"], "string": ["'sum'"], "comment": ["# every batch"]}


@pytest.mark.parametrize("width", [1400, 400])
def test_lines_of_code_do_not_widen_the_page(open_page, tmp_path, width, monkeypatch):
    monkeypatch.setitem(SOURCE, "train.py:10", "x" * 199)
    page = opened(open_page, report_runs.rough(tmp_path / "run"), ["train.py:10"], width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_loss_is_as_tall_as_the_column_beside_it(open_page, tmp_path):
    advice = "Lower the learning rate of this optimizer to a tenth of its value. " * 6
    page = opened(open_page, report_runs.rough(tmp_path / "run"), [], fixes=[advice])
    bottoms = [page.locator(place).bounding_box() for place in ("#verdict", '[data-chart="loss"]')]
    assert abs(bottoms[0]["y"] + bottoms[0]["height"] - bottoms[1]["y"] - bottoms[1]["height"]) < 24
    assert bottoms[1]["y"] + bottoms[1]["height"] < 900


def test_events_are_in_the_order_of_their_steps_and_a_captured_step_is_no_alarm(open_page, tmp_path):
    with surefoot.RunLog(tmp_path / "run", device_seconds=None) as log:
        for step in range(40):
            log.take(StepRow(step=step, time=float(step), loss=1.0 / (step + 1)))
        for event, step, cause in (("spike", 30, "spike"), ("alarm", 31, "incident"), ("lr-change", 3, "")):
            log.event(event, step, "what happened", cause=cause)
    page = opened(open_page, tmp_path / "run", [])
    rows = page.locator("#events tbody tr")
    assert [row.locator(".kind").inner_text() for row in rows.all()] == ["lr-change", "spike", "incident", "end"]
    assert page.locator("#events .kinds button").all_text_contents() == [
        "lr-change 1",
        "spike 1",
        "incident 1",
        "end 1",
    ]


def test_the_differences_of_compared_runs_have_the_names_of_the_runs(open_page, tmp_path):
    folders = [report_runs.quiet(tmp_path / name) for name in ("low_rate", "high_rate")]
    run = json.loads((folders[1] / "run.json").read_text())
    (folders[1] / "run.json").write_text(json.dumps({**run, "torch": "another"}))
    page = open_page(write_comparison(folders)).page
    assert page.locator("#facts td th").all_text_contents() == ["low_rate", "high_rate"]
