"""Verdict, counts and cards, from findings and events of any shape."""

import pytest

import report_runs
import surefoot
from patience import HANG_SECONDS
from surefoot.record.messages import Event, StepRow
from surefoot.report.page.diagnosis import findings_of, steps_of, verdict_of
from surefoot.report.page.payload import MOST_EVENTS, sections
from surefoot.report.page.serve import LiveRun
from surefoot.report.page.source import read_source
from surefoot.report.page.summary import event_cards, tally


def test_a_finding_of_the_contract_is_kept_and_gets_its_title():
    (found,) = findings_of({"findings": [report_runs.FINDING]})
    assert found == {**report_runs.FINDING, "title": "learning rate too high"}


@pytest.mark.parametrize(
    "value",
    [
        None,
        {},
        {"findings": None, "verdict": None, "steps": None},
        {"findings": {"a": 1}, "verdict": "strange", "steps": "many"},
        {"findings": ["word", 5, None], "verdict": 3, "steps": float("nan")},
        {"findings": [], "verdict": [], "steps": 10**400},
    ],
)
def test_what_is_no_diagnosis_is_none(value):
    assert findings_of(value) == []
    assert verdict_of(value) == ""
    assert steps_of(value) is None


def test_a_finding_with_the_wrong_types_is_shown_as_far_as_it_goes():
    odd = {"cause": None, "severity": "fatal", "confidence": "high", "step": "five", "where": "a", "fixes": [1, None]}
    (found,) = findings_of({"findings": [{**odd, "evidence": [1, 2]}]})
    assert (found["cause"], found["severity"], found["confidence"], found["step"]) == ("unknown", "warning", None, None)
    assert (found["where"], found["fixes"], found["evidence"]) == (["a"], ["1"], {"evidence": [1, 2]})


def test_of_a_flood_everything_is_counted(tmp_path):
    with surefoot.RunLog(tmp_path) as log:
        for step in range(12_345):
            log.event("skip", step, "left out", severity="warning", cause="nonfinite")
            if step % 500 == 0:
                log.flush(HANG_SECONDS)
        log.take(StepRow(step=0, time=0.0, loss=1.0))
    source = read_source(tmp_path)
    assert len(source.events) < 5_000
    assert tally(source.events)["skip", "nonfinite"] == 12_345
    (card,) = event_cards(source.events)
    assert card["title"] == "12,345 steps were skipped"
    assert card["causes"] == ["nonfinite (12,345×)"]


def test_a_page_holds_a_bounded_number_of_events_and_the_gravest_of_them(tmp_path):
    many = [Event("spike", step, "up", 0.0, "info") for step in range(MOST_EVENTS + 5_000)]
    many[3] = Event("halt", 3, "stopped", 0.0, "error")
    folder = report_runs.quiet(tmp_path / "run")
    source = read_source(folder)
    found = sections(type(source)(**{**vars(source), "events": many}))["events"]
    assert found["total"] == len(many)
    assert len(found["list"]) <= MOST_EVENTS
    assert found["list"][0]["summary"] == "stopped"


@pytest.mark.parametrize(
    ("changes", "state", "tone"),
    [
        ({"exit_code": 0}, "finished", "none"),
        ({"exit_code": 1}, "failed", "broken"),
        ({"exit_code": None}, "finished", "none"),  # the log says so
    ],
)
def test_how_a_run_ended_is_reported(tmp_path, changes, state, tone):
    folder = report_runs.quiet(tmp_path / "run")
    (folder / "findings.json").unlink()
    report_runs.describe(folder, **changes)
    if state == "running":
        (folder / "events.jsonl").unlink()  # which says that the log was closed
    head = sections(read_source(folder))["head"]
    assert (head["state"], head["tone"]) == (state, tone)


def test_a_run_that_never_said_that_it_ended_counts_as_running(tmp_path):
    folder = report_runs.quiet(tmp_path / "run")
    (folder / "findings.json").unlink()
    (folder / "events.jsonl").unlink()
    report_runs.describe(folder, exit_code=None)
    assert sections(read_source(folder))["head"]["state"] == "running"


@pytest.mark.parametrize(
    "damage", ["[" * 100_000, '{"seconds": 1' + "0" * 400 + "}", '{"findings": [{"step": 1e999}]}']
)
def test_descriptions_that_make_no_sense_are_no_obstacle(tmp_path, damage):
    folder = report_runs.quiet(tmp_path / "run")
    for name in ("run.json", "findings.json"):
        (folder / name).write_text(damage)
    assert sections(read_source(folder))["head"]["steps"] == 200
    assert '"head"' in LiveRun(folder).news("")


def test_remarks_are_no_alarm_in_the_headline(tmp_path):
    with surefoot.RunLog(tmp_path, device_seconds=None) as log:
        log.take(StepRow(0, 0.0, loss=1.0))
        log.event("alarm", 0, "100% of the last 100 steps were clipped", cause="clip.every-step")
        log.event("clip-burst", 0, "9 of the last 10 steps were clipped")
        log.event("overflow", 0, "fp16 gradients overflowed at loss scale 65536", action="skip")
    head = sections(read_source(tmp_path))["head"]
    assert (head["headline"], head["tone"]) == ("no alarms", "none")
    assert {"name": "overflows", "value": 1, "unit": "count"} in head["tiles"]
    assert not {"alarms", "spikes"} & {tile["name"] for tile in head["tiles"]}


def headline(folder, summary, losses=(2.0, 1.0)):
    with surefoot.RunLog(folder, device_seconds=None) as log:
        for step, loss in enumerate(losses):
            log.take(StepRow(step, float(step), loss=loss))
    report_runs.write_findings(folder, {**report_runs.FINDING, "summary": summary})
    return sections(read_source(folder))["head"]["headline"]


def test_the_headline_is_the_first_sentence_of_the_first_finding(tmp_path):
    assert headline(tmp_path, "The rate jumps from 0.001 to 0.1 at step 220. It was meant to fall.") == (
        "The rate jumps from 0.001 to 0.1 at step 220"
    )


def test_a_long_sentence_ends_where_its_reasons_begin(tmp_path):
    reasons = "the input of that batch reaches 2e4, " + "and one row more, " * 12
    assert headline(tmp_path, f"At step 63 the loss jumps to 9: {reasons}.") == "At step 63 the loss jumps to 9"
    assert headline(tmp_path / "whole", "word " * 60) == "learning rate too high"
    rate = (
        "At a learning rate of 1 one step of SGD changes the weights by up to 173% of their norm, and the loss, 2.22 "
        "at first, peaks at 312 and ends at 2.35. 92% of the 64 units are zero."
    )
    assert headline(tmp_path / "rate", rate) == (
        "At a learning rate of 1 one step of SGD changes the weights by up to 173% of their norm"
    )
    remark = "(every row sums to 1 ± 2e-07, and all values are at least 0 in all of the sampled steps)"
    softmax = f"`net.3` returns probabilities {remark} and they go into cross_entropy: the loss cannot fall below 0.9."
    assert headline(tmp_path / "remark", softmax) == (
        "`net.3` returns probabilities and they go into cross_entropy: the loss cannot fall below 0.9"
    )
    assert headline(tmp_path / "short", "It falls (from 9 to 2).") == "It falls (from 9 to 2)"
    labels = (
        "Labels run from 0 to 10 at examples/train.py:131, but the model has 10 outputs "
        "so that cross_entropy raises an error in every batch"
    )
    assert headline(tmp_path / "but", f"{labels}: look at the data.") == labels


def test_the_headline_says_from_when_on_the_loss_is_not_finite(tmp_path):
    losses = (2.0, 1.0, float("nan"), float("inf"))
    assert headline(tmp_path / "a", "The rate jumps.", losses) == "The rate jumps; the loss is not finite from step 2"
    assert headline(tmp_path / "b", "The loss is NaN at step 2.", losses) == "The loss is NaN at step 2"
