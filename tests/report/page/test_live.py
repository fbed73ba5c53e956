"""The live page in a real browser, while a run writes."""

import threading

import pytest

import report_runs
import surefoot
from patience import HANG_SECONDS
from surefoot.record.messages import StepRow
from surefoot.report.page.serve import LiveServer

pytestmark = pytest.mark.browser

LAST = "() => { const chart = surefoot.view.charts.get('loss'); return chart ? chart.lines[0].x.at(-1) : null; }"


@pytest.fixture
def serving(tmp_path):
    with LiveServer(tmp_path / "run", port=0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def write(log, first, last):
    for step in range(first, last):
        log.take(
            StepRow(step=step, time=report_runs.BEGAN + step, loss=3.0 / (1 + step / 50), grad_norm=1.0 + step % 3)
        )
    log.flush(HANG_SECONDS)


def test_the_page_moves_as_the_run_writes_and_keeps_the_zoom(open_page, serving, tmp_path):
    opened = open_page(serving.url, offline=False)
    page = opened.page
    assert page.title() == "Waiting: no run recorded yet · run"
    with surefoot.RunLog(tmp_path / "run") as log:
        write(log, 0, 100)
        page.wait_for_function(f"() => ({LAST})() === 99")
        assert page.title().startswith("Running: step 99")
        assert page.evaluate("surefoot.view.now") == [0, 99]
        write(log, 100, 200)
        page.wait_for_function(f"() => ({LAST})() === 199")
        assert page.evaluate("surefoot.view.now") == [0, 199]  # who has not zoomed goes along
        page.evaluate("surefoot.zoomTo(50, 80)")
        write(log, 200, 300)
        page.wait_for_function(f"() => ({LAST})() === 299")
        assert page.evaluate("surefoot.view.now") == [50, 80]  # who has zoomed stays
        log.event("skip", 250, "Step 250 was left out.", severity="warning", cause="nonfinite")
        log.flush(HANG_SECONDS)
        page.wait_for_selector('#event_cards [data-kind="skip"]')
    report_runs.describe(tmp_path / "run", exit_code=0)
    page.wait_for_function("() => document.getElementById('live').textContent === 'finished'")
    assert opened.said == []
    assert all(url.startswith(serving.url) for url in opened.asked)
    assert {url.removeprefix(serving.url).split("?")[0] for url in opened.asked} <= {"", "data"}


def test_a_server_that_is_gone_is_reported(open_page, tmp_path):
    report_runs.quiet(tmp_path / "run", steps=20)
    server = LiveServer(tmp_path / "run", port=0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    page = open_page(server.url, offline=False).page
    server.shutdown()
    server.server_close()
    thread.join()
    page.wait_for_selector(".live.gone")
    assert page.title().startswith("No connection")


def test_a_page_of_another_origin_cannot_read_the_run(browser, serving, tmp_path):
    report_runs.quiet(tmp_path / "run", steps=20)
    context = browser.new_context()
    page = context.new_page()
    page.route("http://evil.example/", lambda route: route.fulfill(body="<p>hello</p>", content_type="text/html"))
    page.goto("http://evil.example/")
    read = """async (url) => {
      try { return (await (await fetch(url)).text()).length; } catch (error) { return error.name; }
    }"""
    assert page.evaluate(read, f"{serving.url}data") == "TypeError"
    answers = []
    page.on("response", lambda response: answers.append(response.status))
    page.evaluate("async (url) => { try { await fetch(url, {mode: 'no-cors'}); } catch {} }", f"{serving.url}data")
    assert answers in ([403], [])
    context.close()
