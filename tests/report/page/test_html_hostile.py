"""Whatever a layer, an exception, a script or an event is called, it stays text."""

import json

import numpy as np
import pytest

import report_runs
import surefoot
from surefoot.record.messages import Histogram, LayerRows, StepRow
from surefoot.report.page.html import write_report

pytestmark = pytest.mark.browser

HOSTILE = [
    "<img src=x onerror=\"window.broken='img'\">",
    "</script><script>window.broken='script'</script>",
    "<!--<script>window.broken='comment'//-->",
    "'\"><svg onload=window.broken='svg'>",
    "{{script}}{{data}}",
    "javascript:window.broken='url'",
    "\u2028window.broken='line'\u2029",
    "`<b onclick=window.broken='code'>`",
]


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    with surefoot.RunLog(folder) as log:
        for step in range(30):
            for name in HOSTILE[:2]:
                log.part(name).take(StepRow(step, 0.0, "", 1.0 / (step + 1), lr=step, signals={HOSTILE[3]: step % 3}))
            log.take(LayerRows(step, HOSTILE, {"grad_norm": np.ones(8), "dead_share": np.ones(8)}))
            log.take(Histogram(step, "weight", HOSTILE[0], [1] * surefoot.record.bins.COUNT))
        for step, name in enumerate(HOSTILE):
            log.event(
                "alarm", step, name, severity="error", cause=name, action=name, evidence={name: [name, {name: name}]}
            )
    everything = {name: name for name in HOSTILE}
    finding = {**report_runs.FINDING, "where": HOSTILE, "summary": " ".join(HOSTILE), "fixes": HOSTILE}
    report_runs.write_findings(
        folder, {**finding, "evidence": {**everything, "rows": [everything]}, "cause": HOSTILE[1], "step": 12}
    )
    report_runs.describe(folder, script=HOSTILE[0], error=HOSTILE[1], exit_code=1, **{HOSTILE[0]: HOSTILE[1]})
    return write_report(folder)


def test_hostile_names_stay_text_everywhere(open_page, hostile):
    opened = open_page(hostile)
    page = opened.page
    for details in page.locator("details").all():
        details.evaluate("element => { element.open = true; }")
    for mark in page.locator(".mark").all():
        mark.hover()
    for chart in ("loss", "map.grad_norm", "histogram"):
        page.locator(f'[data-chart="{chart}"]').scroll_into_view_if_needed()
        page.locator(f'[data-chart="{chart}"] .u-over').hover()
        assert page.locator("#tip").is_visible(), chart
    assert page.evaluate("window.broken") is None
    assert page.locator("img, svg, iframe, b, body script:not([type]) ~ script").count() == 0
    assert page.locator("script").count() == 2
    assert opened.said == []
    assert opened.asked == [hostile.as_uri()]
    names = page.locator('[data-chart="map.grad_norm"] .names span').evaluate_all("spans => spans.map((s) => s.title)")
    assert names == HOSTILE


def test_the_policy_stops_a_script_that_got_in_all_the_same(open_page, hostile):
    opened = open_page(hostile)
    opened.page.evaluate(
        """() => {
          const script = document.createElement("script");
          script.textContent = "window.broken = 'inline'";
          document.body.append(script);
          const image = document.createElement("img");
          image.src = "https://example.invalid/leak.png";
          document.body.append(image);
        }"""
    )
    assert opened.page.evaluate("window.broken") is None
    assert len(opened.said) >= 2
    assert all("Content Security Policy" in words for words in opened.said)


def test_the_data_of_the_page_is_what_was_written(hostile):
    text = hostile.read_text(encoding="utf-8")
    inside = text.split('<script type="application/json" id="data">')[1].split("</script>")[0]
    assert json.loads(inside)["head"]["script"] == HOSTILE[0]
    assert text.count("<script") == 2
