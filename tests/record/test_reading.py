"""Reading a run back: damaged files, sessions, folders that are none, and runs that are being written."""

import json
import math
import shutil
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patience import HANG_SECONDS
from quiet_log import QuietLog
from runlogs import event, layer_rows, loss_at, step_row
from surefoot import UsageError, load_run
from surefoot.record.limits import LogLimits
from surefoot.record.messages import Batch, LayerRows
from surefoot.record.store import Store
from surefoot.report.page.payload import sections
from surefoot.report.page.source import read_source

BATCHES, ROWS = 6, 10


def session(folder, steps, *, part="", layers=(), events=(), signals=()):
    store = Store(folder, LogLimits())
    rows = [step_row(step, part=part, signals=dict.fromkeys(signals, 1.0)) for step in steps]
    assert store.write(Batch(rows, [layer_rows(step) for step in layers], (), (), events)).error is None
    store.close()


@pytest.mark.parametrize("field", ["event", "severity", "cause", "summary", "part", "time", "step", "evidence"])
@pytest.mark.parametrize("value", [None, ["x"], {"x": 1}, 10**400, "\ud800", math.inf])
def test_an_event_of_the_wrong_types_costs_at_most_itself(tmp_path, field, value):
    session(tmp_path, range(3), events=[event(1)])
    line = {"event": "skip", "step": 2, "summary": "s", "time": 1.0, "severity": "error", field: value}
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    found = load_run(tmp_path).events
    assert found[0].step == 1
    assert all(isinstance(each.event, str) and isinstance(each.cause, str) for each in found)
    sections(read_source(tmp_path))
    session(tmp_path, range(3, 6))
    assert load_run(tmp_path).scalars.num_rows == 6


@pytest.mark.parametrize(
    ("sessions", "lost"),
    [
        ([range(20), range(25, 40)], "steps 20 to 24"),
        ([range(20), range(21, 40)], "step 20"),
        ([range(20), range(20, 40)], ""),
        ([range(20), range(15, 40)], ""),
        ([range(20), range(25, 40), range(10, 60)], ""),  # resumed before the gap
        ([range(20), range(25, 40), range(22, 60)], "steps 20 to 21"),
        ([range(0, 20, 2), range(25, 40)], ""),  # not every step has a row
        ([range(20), range(25, 60, 5)], ""),
    ],
)
def test_steps_that_a_killed_process_did_not_write_are_named(tmp_path, sessions, lost):
    for steps in sessions:
        session(tmp_path, steps)
    (found,) = load_run(tmp_path).problems or [""]
    assert f"no rows for {lost}:" in found if lost else found == ""
    assert sections(read_source(tmp_path))["head"]["problems"] == ([found] if lost else [])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run in a few batches, and where in the file each of them ends."""
    folder = tmp_path_factory.mktemp("whole")
    store, ends = Store(folder, LogLimits()), [0]
    for batch in range(BATCHES):
        store.write(Batch([*map(step_row, range(batch * ROWS, (batch + 1) * ROWS))]))
        ends.append((folder / "telemetry" / "scalars-000-0-00000.arrows").stat().st_size)
    store.close()
    return folder, ends


@given(st.floats(0, 1))
def test_a_file_cut_anywhere_gives_every_whole_batch_before_the_cut(whole, where):
    folder, ends = whole
    file = folder / "telemetry" / "scalars-000-0-00000.arrows"
    data = file.read_bytes()
    cut = int(where * len(data))
    try:
        file.write_bytes(data[:cut])
        run = load_run(folder)
    finally:
        file.write_bytes(data)
    batches = sum(end <= cut for end in ends[1:])
    assert run.scalars["step"].to_pylist() == list(range(batches * ROWS))
    assert (run.problems == []) == (cut in (*ends, len(data)))


@given(st.floats(0, 1, exclude_max=True), st.integers(0, 7))
def test_a_flipped_bit_raises_nothing(whole, where, bit):
    folder, _ = whole
    file = folder / "telemetry" / "scalars-000-0-00000.arrows"
    data = file.read_bytes()
    changed = bytearray(data)
    changed[int(where * len(data))] ^= 1 << bit
    try:
        file.write_bytes(changed)
        load_run(folder)
    finally:
        file.write_bytes(data)


def test_what_a_resumed_session_repeats_replaces_what_was_there(tmp_path):
    session(tmp_path, range(10), layers=(0, 4, 8))
    session(tmp_path, range(5, 8), layers=(6,))
    run = load_run(tmp_path)
    assert run.scalars["step"].to_pylist() == list(range(8))
    assert sorted(set(run.layers["step"].to_pylist())) == [0, 4, 6], "layers follow the steps of their session"


def test_a_part_that_the_later_session_does_not_touch_stays(tmp_path):
    session(tmp_path, range(10), part="critic")
    session(tmp_path, range(3), part="generator")
    parts = load_run(tmp_path).scalars["part"].to_pylist()
    assert (parts.count("critic"), parts.count("generator")) == (10, 3)


def test_of_a_step_that_is_logged_twice_the_last_counts(tmp_path):
    with QuietLog(tmp_path) as log:
        for loss in (1.0, 2.0, 3.0):
            log.take(step_row(1, loss=loss))
            log.take(LayerRows(1, ["fc"], {"grad_norm": [loss]}))
            log.flush(HANG_SECONDS)
    run = load_run(tmp_path)
    assert run.scalars["loss"].to_pylist() == run.layers["grad_norm"].to_pylist() == [3.0]


def test_signals_that_appear_later_are_null_before(tmp_path):
    session(tmp_path, range(2), signals=["kl"])
    session(tmp_path, range(2, 4), signals=["entropy", "kl"])
    scalars = load_run(tmp_path).scalars
    assert scalars.column_names[-2:] == ["signal.kl", "signal.entropy"]
    assert scalars["signal.entropy"].to_pylist() == [None, None, 1.0, 1.0]


def test_two_processes_that_log_into_one_folder_do_not_harm_each_other(tmp_path):
    one, other = QuietLog(tmp_path), QuietLog(tmp_path)
    for step in range(100):
        one.part("one").take(step_row(step))
        other.part("other").take(step_row(step))
        one.event("spike", step, "one")
        other.event("spike", step, "other")
    one.close()
    other.close()
    run = load_run(tmp_path)
    assert (run.scalars.num_rows, len(run.events), run.problems) == (200, 202, [])


def test_a_run_can_be_read_while_it_is_written_and_thinned(tmp_path):
    stop, seen = threading.Event(), []

    def read():
        while not stop.is_set():
            if (tmp_path / "telemetry").is_dir():
                run = load_run(tmp_path)
                steps = run.scalars["step"].to_pylist()
                assert run.scalars["loss"].to_pylist() == [loss_at(step) for step in steps]
                assert steps == sorted(set(steps))
                seen.append((run.problems, steps[0] if steps else 0))

    reader = threading.Thread(target=read)
    reader.start()
    store = Store(tmp_path, LogLimits(scalars_bytes=1 << 18))
    for start in range(0, 20_000, 200):
        store.write(Batch([*map(step_row, range(start, start + 200))], events=[event(start)]))
    store.close()
    stop.set()
    reader.join()
    assert len(seen) > 3
    assert {first for _, first in seen} == {0}


def test_files_of_others_are_left_alone(tmp_path):
    session(tmp_path, range(3))
    (tmp_path / "telemetry" / "notes.txt").write_text("mine")
    (tmp_path / "telemetry" / "scalars-000-0-00009.arrows").write_bytes(b"")
    (tmp_path / "telemetry" / "scalars-000-0-00010.arrows").write_bytes(b"garbage that is no stream")
    (tmp_path / "run.json").write_text("[1]")
    (tmp_path / "findings.json").write_text("{")
    run = load_run(tmp_path)
    assert run.scalars.num_rows == 3
    assert [problem.split(":")[0] for problem in run.problems] == [
        "scalars-000-0-00010.arrows",
        "run.json",
        "findings.json",
    ]
    session(tmp_path, range(3, 6))
    assert load_run(tmp_path).scalars.num_rows == 6


def test_a_folder_that_is_no_run_is_refused_with_the_way_out(tmp_path):
    with pytest.raises(UsageError, match=r"nowhere is not a folder\. Pass the folder that"):
        load_run(tmp_path / "nowhere")
    with pytest.raises(UsageError, match=r"is not a run folder: it contains none of run\.json, events\.jsonl"):
        load_run(tmp_path)
    for rank in range(2):
        session(tmp_path / f"rank{rank}", range(3))
    with pytest.raises(UsageError, match=r"one run for each of 2 ranks: load .*rank0"):
        load_run(tmp_path)


def test_a_copy_of_a_run_reads_the_same(tmp_path):
    session(tmp_path / "run", range(50), layers=range(0, 50, 10), events=[event(3)])
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    one, other = load_run(tmp_path / "run"), load_run(tmp_path / "copy")
    assert one.scalars.equals(other.scalars)
    assert one.layers.equals(other.layers)
    assert one.events == other.events


def test_a_file_with_the_columns_of_another_table_is_reported_and_never_deleted(tmp_path):
    session(tmp_path, range(3), layers=(0,))
    stranger = tmp_path / "telemetry" / "layers-000-0-00007.arrows"
    shutil.copy(tmp_path / "telemetry" / "scalars-000-0-00000.arrows", stranger)
    store = Store(tmp_path, LogLimits(layers_bytes=1 << 17))
    for start in range(10, 3000, 200):
        assert store.write(Batch(layers=[layer_rows(step) for step in range(start, start + 200)])).error is None
    store.close()
    assert load_run(tmp_path).problems == ["layers-000-0-00007.arrows: its columns are not those of `layers`"]
    assert stranger.exists()


def test_the_text_of_a_run_is_one_line(tmp_path):
    session(tmp_path, range(1_200), layers=[7], events=[event(3)])
    shown = repr(load_run(tmp_path))
    assert shown.startswith("RunTables('")
    assert shown.endswith(": not diagnosed, 1,200 steps, 5 layer rows, 1 event)")
