"""Counts of events, and the last of them in groups."""

import torch

import surefoot
from surefoot.record.messages import Event
from surefoot.report.page.source import read_source
from surefoot.report.page.summary import head
from surefoot.report.run_view import MOST_EVENTS, RecentEvents


def event(name, step=0, severity="warning", **more):
    return Event(name, step, more.pop("summary", "words"), float(step), severity, **more)


def test_consecutive_events_of_one_kind_are_one_group():
    events = RecentEvents()
    for step in (3, 4, 5):
        events.add(event("skip", step, cause="nonfinite"))
    events.add(event("skip", 6, cause="spike"))
    assert [(group.step, group.times, group.cause) for group in events.groups] == [(5, 3, "nonfinite"), (6, 1, "spike")]


def test_counts_go_on_when_groups_are_forgotten():
    events = RecentEvents()
    for step in range(100):
        events.add(event("skip" if step % 2 else "rollback", step))
    assert events.counts == {"skips": 50, "rollbacks": 50, "alarms": 100, "drops": 0}
    assert (len(events.groups), events.seen) == (MOST_EVENTS, 100)


def test_only_warnings_and_errors_count_as_alarms():
    events = RecentEvents()
    for severity in ("info", "warning", "error"):
        events.add(event("spike", severity=severity))
    assert events.counts["alarms"] == 2


def test_drops_count_the_rows_they_stand_for():
    events = RecentEvents()
    events.add(event("drops", evidence={"dropped": 40}))
    events.add(event("drops", evidence={"dropped": "strange"}))
    assert events.counts["drops"] == 41


def test_the_latest_are_given_newest_last_and_summaries_fit_one_line():
    events = RecentEvents()
    for step, name in enumerate(("start", "spike", "skip")):
        events.add(event(name, step, summary="two\nlines \x1b[31m"))
    assert [group.event for group in events.latest(2)] == ["spike", "skip"]
    assert events.latest(0) == []
    assert events.latest(1)[0].summary == "two lines [31m"


def test_the_summary_the_terminal_and_the_page_count_the_same_alarms(tmp_path):
    torch.manual_seed(0)
    model, log = torch.nn.Linear(4, 1), surefoot.RunLog(tmp_path)
    stabilizer = surefoot.TrainingStabilizer(model, torch.optim.SGD(model.parameters(), lr=1e-3), log=log)
    for step in range(60):
        inputs = torch.randn(8, 4) * (float("nan") if step in (30, 40) else 1.0)
        stabilizer.backward(model(inputs).square().mean())
        stabilizer.step()
    summary = stabilizer.summary()
    log.close()
    source = read_source(tmp_path)
    recent = RecentEvents()
    for event in source.events:
        recent.add(event)
    shown = {tile["name"]: tile["value"] for tile in head(source)["tiles"]}
    assert "2 skipped, 0 clipped, 0 overflows, 2 alarms" in str(summary)
    assert (recent.counts["alarms"], shown["alarms"]) == (2, 2)
