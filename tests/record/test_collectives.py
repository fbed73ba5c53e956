"""A collective that failed is an event of the run log."""

from __future__ import annotations

import pytest

import surefoot as sf
from surefoot.record.collectives import COLLECTIVE_FAILED, MOST_ENTRIES, collectives_of, recorded_collectives
from surefoot.record.messages import StepRow


def test_a_program_that_ends_with_a_failed_collective_has_an_event_of_it(tmp_path):
    for name, first in (("a", "NCCL error in: NCCLUtils.cpp, ncclRemoteError: a rank is gone"), ("b", "another error")):
        log = sf.RunLog(tmp_path / name, device_seconds=None)
        log.take(StepRow(step=4, time=0.0, loss=1.0))
        try:
            with log:
                raise RuntimeError("the loop ended") from RuntimeError(first)
        except RuntimeError:
            pass
        events = [(event.event, event.cause, event.step) for event in sf.load_run(tmp_path / name).events]
        assert events == [*([("alarm", COLLECTIVE_FAILED, 4)] if name == "a" else []), ("end", "", 4)]


def entry(number, name="nccl:all_reduce", state="completed", group=0):
    return {"collective_seq_id": number, "pg_id": group, "profiling_name": name, "state": state, "input_sizes": [[9]],
            "process_group": ["0", "default_pg"]}  # fmt: skip


def test_the_last_collective_is_under_way_unless_its_state_or_its_group_says_that_it_is_complete():
    started = {"entries": [entry(7), entry(8, "nccl:broadcast", "started")], "pg_status": {}}
    assert [each.is_complete for each in collectives_of(started)] == [True, False]
    assert str(collectives_of(started)[-1]) == "nccl:broadcast number 8 of group 0, sizes [[9]], not complete"
    gloo = {"entries": [entry(7, state="scheduled"), entry(8, state="scheduled")],
            "pg_status": {"0": {"last_completed_collective": "7"}}}  # fmt: skip
    assert [each.is_complete for each in collectives_of(gloo)] == [True, False]


def test_of_a_long_trace_the_end_is_kept():
    found = collectives_of({"entries": [entry(number) for number in range(500)]})
    assert [found[0].number, found[-1].number] == [500 - MOST_ENTRIES, 499]


@pytest.mark.parametrize("trace", [None, [], {}, {"entries": None}, {"entries": []}])
def test_a_trace_without_collectives_has_none(trace):
    assert collectives_of(trace) == []


def test_a_process_without_collectives_can_be_asked():
    assert isinstance(recorded_collectives(), list)
