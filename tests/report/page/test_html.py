"""The page in a real browser, without a network. Pixels and elements are read, not only the absence of errors."""

import json
from functools import cache
from itertools import pairwise

import numpy as np
import pytest

import report_runs
import surefoot
from report_browser import Opened
from surefoot.record.messages import DeviceRow, LayerRows, StepRow
from surefoot.report.page.html import write_report

pytestmark = pytest.mark.browser

INK = """(name) => {
  const canvas = document.querySelector(`[data-chart="${name}"] canvas`);
  const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const colours = new Set();
  let inked = 0;
  for (let at = 0; at < data.length; at += 4) {
    if (data[at + 3] <= 60) continue;
    inked += 1;
    colours.add([data[at], data[at + 1], data[at + 2]].map((channel) => channel >> 4).join());
  }
  return [inked / (data.length / 4), colours.size];
}"""
RANGES = """() => [...surefoot.view.charts].map(([name, {plot}]) => [name, plot.scales.x.min, plot.scales.x.max])"""


@pytest.fixture(scope="module")
def rough(tmp_path_factory):
    folder = report_runs.rough(tmp_path_factory.mktemp("runs") / "rough")
    report_runs.write_findings(folder, report_runs.FINDING, {**report_runs.FINDING, "severity": "info", "cause": "x.y"})
    return write_report(folder)


@pytest.fixture(scope="module")
def shared(browser, rough):
    """One page for the tests that leave it as it was but for the zoom."""
    window = {"viewport": {"width": 1100, "height": 800}, "reduced_motion": "reduce", "color_scheme": "light"}
    context = browser.new_context(offline=True, **window)
    opened = Opened(context.new_page())
    opened.go(rough.as_uri())
    yield opened.unfold()
    context.close()


@pytest.fixture
def page(shared):
    shared.mouse.move(0, 0)
    shared.evaluate("() => { surefoot.showAll(); scrollTo(0, 0); }")
    return shared


@pytest.fixture(scope="module")
def at_width(browser, rough):
    """A page in a window of this width, for the tests that only look at it."""
    contexts = []

    @cache
    def opened(width):
        contexts.append(browser.new_context(offline=True, viewport={"width": width, "height": 800}))
        found = Opened(contexts[-1].new_page())
        found.go(rough.as_uri())
        return found

    yield opened
    for context in contexts:
        context.close()


def drag(page, chart, start, end):
    page.locator(f'[data-chart="{chart}"]').scroll_into_view_if_needed()
    box = page.locator(f'[data-chart="{chart}"] .u-over').bounding_box()
    y = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + start * box["width"], y)
    page.mouse.down()
    page.mouse.move(box["x"] + (start + end) / 2 * box["width"], y)
    page.mouse.move(box["x"] + end * box["width"], y)
    page.mouse.up()


def test_it_opens_without_an_error_and_asks_for_nothing(at_width, rough):
    opened = at_width(1100)
    assert opened.said == []
    assert opened.asked == [rough.as_uri()]
    assert (
        opened.page.title()
        == "Broken: At a learning rate of 1 the loss rises; the loss is not finite from step 200 · train.py"
    )


def test_the_page_of_a_killed_run_says_that_the_log_does_not_end(open_page, tmp_path):
    folder = report_runs.quiet(tmp_path / "run")
    for name in ("findings.json", "events.jsonl"):
        (folder / name).unlink()
    report_runs.describe(folder, exit_code=None)
    opened = open_page(write_report(folder))
    assert opened.page.locator("h1").inner_text().startswith("Unfinished")
    assert "the run was killed" in opened.page.locator("#unfinished").inner_text()


def test_every_chart_is_drawn(page):
    names = [name for name, *_ in page.evaluate(RANGES)]
    assert {
        "loss",
        "grad_norm",
        "lr",
        "loss_scale",
        "signal.kl",
        "map.grad_norm",
        "map.update_ratio",
        "map.dead_share",
    } <= {*names}
    assert {"histogram", "device-memory", "host-memory"} <= {*names}
    for name in names:
        inked, colours = page.evaluate(INK, name)
        assert inked > 0.005, name  # lines, grid and labels; an empty canvas has none
        assert colours >= 3, name
    inked, colours = page.evaluate(INK, "map.grad_norm")
    assert inked > 0.5  # a map fills its plot
    assert colours > 20


def test_zooming_one_chart_zooms_all(page):
    drag(page, "grad_norm", 0.25, 0.5)
    ranges = page.evaluate(RANGES)
    assert len(ranges) >= 10
    for name, low, high in ranges:
        assert (low, high) == (pytest.approx(100, abs=4), pytest.approx(200, abs=4)), name
    assert "Steps 100 to" in page.locator("#zoombar .range").inner_text()
    page.locator('[data-chart="loss"] .u-over').dblclick()
    assert all((low, high) == (0, 399) for _, low, high in page.evaluate(RANGES))


def test_between_two_readings_of_the_device_its_line_is_still_drawn(open_page, tmp_path):
    with surefoot.RunLog(tmp_path / "run", device_seconds=None) as log:
        for step in range(101):
            log.take(StepRow(step, float(step), loss=1.0 + step % 3))
            if step in (0, 100):
                log.take(DeviceRow(float(step), "host", step, {"process_memory": 2.0**30 * (1 + step / 100)}))
    page = open_page(write_report(tmp_path / "run")).unfold()
    drag(page, "loss", 0.3, 0.6)
    low, high = page.evaluate("""() => {
      const {min, max} = surefoot.view.charts.get("host-memory").plot.scales.y;
      return [min, max];
    }""")
    assert low < 1.3 * 2**30 < 1.6 * 2**30 < high


def test_zooming_a_map_zooms_the_lines(page):
    drag(page, "map.update_ratio", 0.5, 0.75)
    assert all(high - low == pytest.approx(100, abs=6) for _, low, high in page.evaluate(RANGES))


def test_charts_are_reached_and_zoomed_by_keys(page):
    page.locator("#theme").focus()
    for _ in range(20):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.matches('[data-chart=loss] .plot')"):
            break
    else:
        raise AssertionError("the Tab key never reached the loss")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("+")
    assert all(high - low == pytest.approx(199.5) for _, low, high in page.evaluate(RANGES))
    before = page.evaluate(RANGES)[0][1]
    page.keyboard.press("Shift+ArrowRight")
    assert page.evaluate(RANGES)[0][1] > before
    page.keyboard.press("ArrowRight")
    assert page.locator("#tip").is_visible()
    assert "Step" in page.locator("#tip .title").inner_text()
    page.keyboard.press("0")
    assert page.evaluate(RANGES)[0][1:] == [0, 399]


def test_a_finding_card_opens_its_evidence(page):
    card = page.locator('[data-cause="lr.too-high"]')
    assert card.locator("ol li").all_inner_texts() == ["Divide the rate by 10: lr=0.1.", "Warm up."]
    assert not card.locator(".evidence table").first.is_visible()
    card.locator(".evidence summary").focus()
    page.keyboard.press("Enter")
    assert card.locator(".evidence table").first.is_visible()
    words = card.locator(".evidence").inner_text()
    assert "NaN" in words
    assert "∞" in words


def test_the_step_of_a_finding_leads_to_the_charts(page):
    page.locator('[data-cause="lr.too-high"] button.step').click()
    for name, low, high in page.evaluate(RANGES):
        assert low < 120 < high, name
        assert high - low < 40, name


def test_events_are_marked_and_tell_what_happened_on_hover(page):
    marks = page.locator(".lane .mark")
    counts = [int(count) for count in marks.evaluate_all("marks => marks.map((mark) => mark.dataset.count)")]
    assert sum(counts) == 9  # eight events and the finding
    assert max(counts) >= 4  # three skips, the rollback and the checkpoint lie within a few pixels
    page.locator('.mark[data-count="1"].warning, .mark.flag, .mark.many').first.hover()
    assert page.locator("#tip").is_visible()
    marks.filter(has_text=str(max(counts))).first.hover()
    assert "Step 200 was left out: NaN." in page.locator("#tip").inner_text()


def test_one_enormous_loss_does_not_flatten_the_curve(page):
    high = page.evaluate("surefoot.view.charts.get('loss').plot.scales.y.max")
    assert 3 < high < 10
    assert page.evaluate("surefoot.view.charts.get('loss').edgeMarks") >= 2  # the 1e20, and the NaN


def test_the_scale_can_be_logarithmic(page):
    page.locator('[data-chart="loss"] .toggle.log').click()
    assert page.locator('[data-chart="loss"] .toggle.log').get_attribute("aria-pressed") == "true"
    assert page.evaluate("surefoot.view.charts.get('loss').plot.scales.y.max") < 2  # decades


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_follows_the_system_and_the_toggle(open_page, rough, scheme):
    page = open_page(rough, color_scheme=scheme).page
    bright = "document.defaultView.getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0]"
    assert (page.evaluate(bright) > 128) == (scheme == "light")
    page.locator("#theme").click()
    assert (page.evaluate(bright) > 128) == (scheme == "dark")
    assert page.evaluate(INK, "loss")[0] > 0.005


def test_it_can_be_read_at_400_pixels(at_width):
    page = at_width(400).page
    assert page.evaluate("document.documentElement.scrollWidth") == 400
    assert page.evaluate(INK, "loss")[0] > 0.005
    wide = page.evaluate("surefoot.view.charts.get('loss').plot.bbox.width / devicePixelRatio")
    assert wide > 250


@pytest.mark.parametrize("width", [400, 1100])
def test_labels_do_not_overlap(at_width, width):
    page = at_width(width).page
    for place in (".names", ".lane", ".tools", ".tiles", "#zoombar .buttons", "#sections"):
        overlaps = page.evaluate(
            """(place) => [...document.querySelectorAll(place)].flatMap((group) => {
              const boxes = [...group.children].map((one) => [one.textContent, one.getBoundingClientRect()]);
              return boxes.flatMap(([a, first], at) => boxes.slice(at + 1)
                .filter(([, other]) => first.width && other.width
                  && Math.min(first.right, other.right) - Math.max(first.left, other.left) > 1
                  && Math.min(first.bottom, other.bottom) - Math.max(first.top, other.top) > 1)
                .map(([b]) => `${a} | ${b}`));
            })""",
            place,
        )
        assert overlaps == [], place


@pytest.mark.parametrize("width", [400, 1100])
def test_long_names_are_shortened_whole_on_hover_and_still_told_apart(at_width, width):
    page = at_width(width).page
    labels = page.locator('[data-chart="map.grad_norm"] .names span').evaluate_all(
        "spans => spans.map((span) => [span.textContent, span.title, span.getBoundingClientRect().left])"
    )
    assert len(labels) == 16
    assert all("…" in short and len(short) < 26 for short, _, _ in labels)
    assert all(left > 8 for _, _, left in labels)  # inside the card
    assert labels[0][1] == f"generator.{report_runs.LAYERS[0]}"
    assert len({short for short, _, _ in labels}) == 16


def test_three_hundred_layers_name_only_as_many_as_fit(open_page, tmp_path):
    names = [f"model.layers.{place}.weight" for place in range(300)]
    with surefoot.RunLog(tmp_path) as log:
        for step in range(20):
            log.take(StepRow(step=step, time=0.0, loss=1.0 / (step + 1)))
            log.take(LayerRows(step, names, {"grad_norm": np.random.default_rng(step).random(300)}))
    opened = open_page(write_report(tmp_path))
    page = opened.page
    assert opened.said == []
    assert 20 <= page.locator(".names span").count() <= 40
    assert page.evaluate(INK, "map.grad_norm")[0] > 0.5


def test_sixty_four_ranks_are_one_map_and_the_rank_of_the_charts_is_named(open_page, tmp_path):
    for rank in range(64):
        folder = tmp_path / f"rank{rank}"
        with surefoot.RunLog(folder, device_seconds=None) as log:
            for step in range(8):
                log.take(StepRow(step=step, time=0.1 * step, loss=1.0, grad_norm=1.0 + rank))
        report_runs.describe(folder, rank=rank, world_size=64)
        found = [{**report_runs.FINDING, "step": 4}] if rank == 17 else []
        report_runs.write_findings(folder, *found, verdict="broken" if found else "healthy")
    page_path = write_report(tmp_path)
    opened = open_page(page_path)
    page = opened.page
    assert (opened.said, opened.asked) == ([], [page_path.as_uri()])
    assert page.locator(".ranks summary").inner_text() == "Charts of rank 17; verdicts of all 64 ranks"
    page.locator(".ranks summary").click()
    assert page.locator(".ranks li").count() == 64
    assert page.evaluate(INK, "map.rank_grad_norm")[0] > 0.5


def test_a_flood_of_events_is_grouped_without_overlap(open_page, tmp_path):
    with surefoot.RunLog(tmp_path) as log:
        for step in range(900):
            log.take(StepRow(step=step, time=0.0, loss=1.0 / (step + 1)))
            log.event("skip", step, "left out", severity="warning")
    page = open_page(write_report(tmp_path)).page
    boxes = page.locator(".mark").evaluate_all("marks => marks.map((mark) => mark.getBoundingClientRect().toJSON())")
    assert 10 < len(boxes) < 60
    assert all(a["right"] <= b["left"] for a, b in pairwise(boxes))


def test_a_histogram_of_another_layer_and_kind_can_be_chosen(page):
    assert "NaN: up to 7 values, first at step 200" in page.locator("#histograms .odd").inner_text()
    before = page.locator("#histograms select").input_value()
    page.locator("#histograms select").select_option(index=1)
    assert page.locator("#histograms select").input_value() != before
    page.locator('#histograms [data-kind="gradient"]').click()
    assert page.locator('#histograms [data-kind="gradient"]').get_attribute("aria-pressed") == "true"
    assert page.evaluate(INK, "histogram")[0] > 0.1


def test_events_can_be_narrowed_to_some_kinds(page):
    kinds = page.locator("#events tbody .kind")
    assert "skip" in kinds.all_inner_texts()
    page.locator('#events [data-kind="skip"]').click()
    assert "skip" not in kinds.all_inner_texts()
    page.locator('#events [data-kind="skip"]').click()


def test_equal_events_in_a_row_are_one_row_that_opens(open_page, tmp_path):
    with surefoot.RunLog(tmp_path) as log:
        for step in range(30):
            log.take(StepRow(step=step, time=0.0, loss=1.0 / (step + 1)))
            if 5 <= step < 23:
                log.event("spike", step, f"the loss jumps at {step}", severity="warning")
        log.event("halt", 29, "stopped", severity="error")
    page = open_page(write_report(tmp_path)).page
    rows = page.locator("#events tbody tr")
    assert rows.count() == 2  # the spikes, the halt
    assert "spike × 18" in rows.first.inner_text()
    assert rows.first.locator("td.value").inner_text() == "5 to 22"
    rows.first.locator(".others summary").click()
    assert rows.first.locator(".others li").count() == 17
    assert "the loss jumps at 22" in rows.first.locator(".others li").last.inner_text()


def test_after_a_run_was_started_again_its_events_are_in_the_order_in_which_they_happened(open_page, tmp_path):
    for first, last in ((0, 10), (10, 20)):
        with surefoot.RunLog(tmp_path) as log:
            if first:
                log.event("resume", first, "continues")
            for step in range(first, last):
                log.take(StepRow(step=step, time=0.0, loss=1.0))
            log.event("checkpoint", last, "saved")
            log.event("spike", last - 2, "logged late", severity="warning")
            log.event("end", last - 1, "stopped")
    page = open_page(write_report(tmp_path)).page
    kinds = page.locator("#events tbody .kind").all_inner_texts()
    assert kinds == ["spike", "checkpoint", "end", "resume", "spike", "checkpoint", "end"]


WORDS = """() => [...document.querySelectorAll("#facts .plain .plain th, #facts .plain .plain td")].flatMap((cell) => {
  const text = cell.firstChild;
  if (!text || text.nodeType !== Node.TEXT_NODE) return [];
  return [...text.data.matchAll(/[^ ,]+/g)].filter((word) => {
    const range = document.createRange();
    range.setStart(text, word.index);
    range.setEnd(text, word.index + word[0].length);
    return range.getClientRects().length > 1;
  }).map((word) => word[0]);
})"""


@pytest.mark.parametrize("width", [420, 1000])
def test_the_table_of_the_run_breaks_no_word(open_page, tmp_path, width):
    settings = {"lr": 0.01, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01, "amsgrad": False}
    settings |= {"maximize": False, "capturable": False, "differentiable": False, "decoupled_weight_decay": True}
    optimizers = [{"part": "", "type": "AdamW", "settings": [settings]}]
    (tmp_path / "run.json").write_text(json.dumps({"schema": 1, "script": "train.py", "optimizers": optimizers}))
    page = open_page(write_report(tmp_path)).page
    page.set_viewport_size({"width": width, "height": 900})
    assert page.locator("#facts .plain .plain th").count() > 9
    assert page.evaluate(WORDS) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_an_event_names_the_folder_that_its_step_is_kept_in(open_page, tmp_path):
    evidence = {"incident": "runs/a/incidents/000000003", "replay": "surefoot replay runs/a/incidents/000000003"}
    with surefoot.RunLog(tmp_path) as log:
        for step in range(5):
            log.take(StepRow(step=step, time=0.0, loss=1.0))
        log.event("skip", 3, "left out", severity="error", evidence=evidence)
        log.event("skip", 4, "left out", severity="error")
    page = open_page(write_report(tmp_path)).page
    (kept,) = page.locator("#events .kept").all_inner_texts()
    assert kept == f"captured in {evidence['incident']} · to run it again: {evidence['replay']}"


def test_a_healthy_run_says_so_and_has_no_empty_sections(open_page, tmp_path):
    page = open_page(write_report(report_runs.quiet(tmp_path / "run"))).page
    assert page.locator("h1").inner_text() == "Healthy: no problem found"
    for section in ("findings", "event_cards", "maps", "histograms", "device", "events"):
        assert not page.locator(f"#{section}").is_visible(), section
    assert "Learning rate 0.001 (constant)" in page.locator("#charts").inner_text()


def test_verdict_fix_and_loss_are_visible_without_scrolling(open_page, rough):
    page = open_page(rough, viewport={"width": 1400, "height": 800}).page
    loss = page.locator('[data-chart="loss"]').bounding_box()
    verdict = page.locator(".verdict").bounding_box()
    assert loss["x"] > verdict["x"] + verdict["width"]  # beside it
    assert loss["y"] + loss["height"] < 800
    assert "First fix: Divide the rate by 10: lr=0.1." in page.locator(".verdict").inner_text()
    narrow = open_page(rough, viewport={"width": 1000, "height": 800}).page
    assert narrow.locator('[data-chart="loss"]').bounding_box()["y"] > narrow.locator(".tiles").bounding_box()["y"]


DASHES = """(name) => {
  const {plot} = surefoot.view.charts.get(name);
  const x = Math.round(plot.valToPos(120, "x", true));
  const {top, height} = plot.bbox;
  const {data} = plot.ctx.getImageData(x - 1, top, 3, height);
  let red = 0;
  for (let at = 0; at < data.length; at += 4) red += data[at] > 150 && data[at + 1] < 110 && data[at + 2] < 120 ? 1 : 0;
  return red / height;
}"""


def test_the_step_of_the_first_finding_is_marked_in_every_chart(page):
    for name, *_ in page.evaluate(RANGES):
        assert page.evaluate(DASHES, name) > 0.3, name


def test_tiles_show_the_main_numbers_of_the_run(page):
    tiles = dict(
        page.locator(".tiles li").evaluate_all(
            "tiles => tiles.map((tile) => [tile.dataset.tile, tile.querySelector('strong').textContent])"
        )
    )
    assert tiles["steps"] == "400"
    assert tiles["exit status"] == "0"
    page.locator('[data-tile="steps skipped"]').wait_for()


def test_the_command_that_replays_the_kept_step_can_be_copied(browser, tmp_path):
    command = "surefoot replay runs/a/incidents/000000003 --script train.py"
    with surefoot.RunLog(tmp_path) as log:
        for step in range(5):
            log.take(StepRow(step=step, time=0.0, loss=1.0))
        log.event("skip", 3, "skipped", severity="error", evidence={"incident": "runs/a", "replay": command})
    context = browser.new_context(offline=True, permissions=["clipboard-read", "clipboard-write"])
    page = Opened(context.new_page()).go(write_report(tmp_path).as_uri())
    assert "Step 3 was captured" in page.locator(".incident").inner_text()
    page.locator(".incident .copy").click()
    page.locator(".incident .copy", has_text="Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == command
    context.close()


def test_a_chart_can_be_saved_as_a_table_and_as_a_picture(page, tmp_path):
    with page.expect_download() as saved:
        page.locator('[data-chart="loss"] .save', has_text="CSV").click()
    saved.value.save_as(tmp_path / "loss.csv")
    lines = (tmp_path / "loss.csv").read_text().splitlines()
    assert lines[0] == '"series","part","step","value"'
    assert len(lines) > 400
    assert any(line.endswith(",NaN") for line in lines)
    with page.expect_download() as saved:
        page.locator('[data-chart="map.grad_norm"] .save', has_text="PNG").click()
    saved.value.save_as(tmp_path / "map.png")
    assert saved.value.suggested_filename.endswith("grad_norm.png")
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


def test_the_address_leads_to_the_steps_on_show(page, open_page, rough):
    page.evaluate("surefoot.zoomTo(100, 200)")
    page.wait_for_url("**#steps=100-200")
    again = open_page(f"{rough.as_uri()}#steps=100-200").page
    assert all((low, high) == (100, 200) for _, low, high in again.evaluate(RANGES))
    page.evaluate("surefoot.showAll()")
    page.wait_for_url("**/report.html")


def test_sections_are_reached_by_links_and_folded_ones_open(open_page, rough):
    page = open_page(rough, viewport={"width": 1400, "height": 800}).page
    names = page.locator("#sections a").all_inner_texts()
    assert (names[0], names[-1]) == ("Findings", "Run")
    assert {"Training", "Layers", "Histograms", "Events"} <= {*names}
    assert not page.locator("#histograms").is_visible()
    page.locator("#sections a", has_text="Histograms").click()
    page.locator('[data-chart="histogram"] canvas').wait_for()
    assert page.evaluate(INK, "histogram")[0] > 0.1
