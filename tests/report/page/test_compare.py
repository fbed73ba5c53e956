"""Several runs on one page."""

import math

import pytest

import report_runs
import surefoot
from report_browser import Opened
from surefoot.errors import UsageError
from surefoot.record.messages import StepRow
from surefoot.report.page.compare import compared_sections, differing, run_names, write_comparison
from surefoot.report.page.source import read_source


def run(folder, losses, lr=0.1, **description):
    with surefoot.RunLog(folder, device_seconds=None) as log:
        for step, loss in enumerate(losses):
            log.take(StepRow(step, float(step), loss=loss, grad_norm=1.0 + step % 2, lr=lr))
    report_runs.describe(folder, **description)
    return folder


def compared(*folders):
    return compared_sections([read_source(folder) for folder in folders])


def chart(found, name):
    return next(one for one in found["charts"] if one["id"] == name)


def test_each_chart_has_the_curves_of_all_runs_whatever_their_length(tmp_path):
    found = compared(run(tmp_path / "short", [3.0, 2.0, 1.0]), run(tmp_path / "long", [3.0] * 50))
    curves = {series["part"]: series for series in chart(found, "loss")["series"] if series["role"] != "smooth"}
    assert len(curves["short"]["x"]) == 3
    assert len(curves["long"]["x"]) == 50
    assert found["head"]["steps"] == 50


def test_a_number_that_is_the_same_throughout_all_runs_is_a_sentence_and_another_is_drawn(tmp_path):
    same = compared(run(tmp_path / "a", [1.0, 2.0]), run(tmp_path / "b", [1.0, 2.0]))
    assert chart(same, "lr")["flat"] == 0.1
    other = compared(run(tmp_path / "c", [1.0, 2.0]), run(tmp_path / "d", [1.0, 2.0], lr=0.2))
    assert "flat" not in chart(other, "lr")
    assert {series["part"] for series in chart(other, "lr")["series"]} == {"c", "d"}


def test_parts_of_a_run_keep_their_names(tmp_path):
    report_runs.rough(tmp_path / "gan", steps=60)
    run(tmp_path / "plain", [1.0, 2.0])
    parts = {series["part"] for series in chart(compared(tmp_path / "gan", tmp_path / "plain"), "loss")["series"]}
    assert parts == {"gan generator", "gan discriminator", "plain"}


def test_the_best_run_and_every_verdict_are_in_the_headline(tmp_path):
    report_runs.write_findings(run(tmp_path / "bad", [2.0, math.nan]), report_runs.FINDING)
    head = compared(tmp_path / "bad", run(tmp_path / "good", [2.0, 0.123456]))["head"]
    assert head["headline"] == "bad (broken) and good (not diagnosed)"
    assert head["lead"] == "Lowest loss: 0.123 in good, 2 in bad."


def test_runs_of_the_same_name_are_distinguished_by_their_folders(tmp_path):
    folders = [tmp_path / "monday" / "run", tmp_path / "tuesday" / "run"]
    assert run_names(folders) == ["monday/run", "tuesday/run"]
    assert run_names([folders[0], folders[0]]) == ["run (1)", "run (2)"]


def test_only_what_differs_is_listed(tmp_path):
    first = [["torch", "2.11"], ["script", "a.py"], ["started", "1"]]
    second = [["torch", "2.13"], ["script", "a.py"], ["started", "2"], ["rank", 0]]
    assert differing([first, second], ["a", "b"]) == [
        ["torch", {"a": "2.11", "b": "2.13"}],
        ["rank", {"a": "none", "b": 0}],
    ]


def test_with_many_runs_charts_show_smoothed_lines_only(tmp_path):
    found = compared(*(run(tmp_path / f"run{n}", [1.0 / (step + 1) for step in range(40)]) for n in range(5)))
    assert {series["role"] for series in chart(found, "loss")["series"]} == {"smooth"}


def test_too_many_runs_are_refused_with_the_limit(tmp_path):
    with pytest.raises(UsageError, match="at most 12 runs; got 13"):
        write_comparison([tmp_path] * 13)


def test_secrets_in_a_description_are_redacted(tmp_path):
    run(tmp_path / "a", [1.0, 2.0], arguments=["--token=hunter2-very-secret"])
    assert "hunter2" not in write_comparison([tmp_path / "a", run(tmp_path / "b", [1.0])]).read_text()


@pytest.mark.browser
def test_the_page_opens_without_an_error_and_draws_a_curve_for_each_run(browser, tmp_path):
    hostile = tmp_path / "<img src=x onerror=alert(1)>"
    report_runs.write_findings(run(hostile, [2.0 + step % 3 for step in range(90)]), report_runs.FINDING)
    page_path = write_comparison(
        [hostile, run(tmp_path / "good", [1.0 / (step + 1) for step in range(60)])], tmp_path / "c.html"
    )
    context = browser.new_context(offline=True, viewport={"width": 1400, "height": 900})
    opened = Opened(context.new_page())
    page = opened.go(page_path.as_uri())
    assert (opened.said, opened.asked) == ([], [page_path.as_uri()])
    assert page.locator("h1").inner_text().startswith("Compared: ")
    assert page.locator("img").count() == 0
    assert page.locator("#runs tbody tr").first.locator("td").all_inner_texts() == ["Broken", "not diagnosed"]
    assert page.locator('[data-chart="loss"] .entry').count() == 2
    page.locator("#runs .remarks > summary").click()
    assert page.locator('#runs [data-cause="lr.too-high"]').is_visible()
    context.close()
