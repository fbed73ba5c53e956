"""`events.jsonl`: torn lines, floods, evidence that is not JSON."""

import json
import math
from collections import Counter

import numpy as np
import pytest

from quiet_log import QuietLog
from runlogs import event
from surefoot import load_run
from surefoot.record.events import EventFile, parse_events
from surefoot.record.messages import Event


def written(folder, events):
    file = EventFile(folder)
    file.append(events)
    file.append(file.final_events())
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def test_a_line_has_the_fields_of_an_event(tmp_path):
    sent = Event("skip", 7, "a NaN", 12.5, "warning", "nonfinite", "skip", "critic", {"loss": math.inf})
    assert written(tmp_path, [sent]) == [
        {"event": "skip", "step": 7, "summary": "a NaN", "time": 12.5, "severity": "warning", "cause": "nonfinite"}
        | {"action": "skip", "part": "critic", "evidence": {"loss": "inf"}}
    ]


@pytest.mark.parametrize("torn", [b'{"event": "spike", "st', b"{", b"\xff\xfe", b"null", b'{"event": "spike"}'])
def test_a_torn_last_line_costs_itself_and_not_the_first_line_of_the_next_session(tmp_path, torn):
    written(tmp_path, [event(1)])
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.write(torn)
    assert [each.step for each in load_run(tmp_path).events] == [1]
    with QuietLog(tmp_path) as log:
        log.take(event(2))
    run = load_run(tmp_path)
    assert [each.step for each in run.events] == [1, 2]
    assert run.problems == ["events.jsonl: 1 line is invalid or incomplete"]


def test_a_flood_of_events_is_a_few_thousand_lines_with_their_count(tmp_path):
    file = EventFile(tmp_path)
    skip, other = event(1, "skip", cause="nonfinite"), event(2, "skip", cause="spike")
    for _ in range(20):
        file.append([skip] * 10_000)
    file.append([other])
    file.append([skip] * 5)
    file.append(file.final_events())
    events, bad = parse_events(file.path.read_bytes())
    assert bad == 0
    assert Counter((each.event, each.cause) for each in events) == {
        ("skip", "nonfinite"): 1000 + 900 + 900 + 100,
        ("skip", "spike"): 1,
        ("drops", "nonfinite"): 2,
    }
    assert max(each.evidence.get("count", 0) for each in events if each.event == "skip") == 200_000
    assert events[1000].summary == "more than 1,000 of `skip` (nonfinite): only some of the further ones are written"
    assert events[-1].evidence == {"of": "skip", "count": 200_005}


def test_a_resumed_run_continues_counting(tmp_path):
    for _ in range(3):
        lines = written(tmp_path, [event(1)] * 600)
    assert 1000 < len(lines) < 1100
    assert max(line["evidence"].get("count", 0) for line in lines) >= 1600


def test_a_cause_per_step_is_no_way_around(tmp_path):
    lines = written(tmp_path, [event(step, cause=f"at {step}") for step in range(20_000)])
    assert len(lines) < 4000


class Hostile:
    def __str__(self):
        raise RuntimeError("no")


def endless():
    value = {}
    value["again"] = value
    return value


@pytest.mark.parametrize(
    "evidence",
    [endless(), {"x": Hostile()}, {"x": "y" * 100_000}, {1: np.float32("nan")}, {"x": {2, 3}}, {"x": "\ud800"}, [1]],
    ids=["endless", "hostile", "long", "key", "set", "surrogate", "list"],
)
def test_evidence_that_is_not_json_costs_the_evidence_and_not_the_event(tmp_path, evidence):
    with QuietLog(tmp_path) as log:
        log.take(event(1, evidence=evidence))
        log.take(event(2))
    assert [each.step for each in load_run(tmp_path).events] == [1, 2]


def test_a_step_from_numpy_is_a_number(tmp_path):
    assert written(tmp_path, [event(np.int64(3))])[0]["step"] == 3
