"""The last collectives, as torch's flight recorder writes them down."""

from __future__ import annotations

import pytest

from surefoot.record.flight_recorder import MOST_ENTRIES, collectives_of, recorded_collectives


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
