"""One session in a run folder: everything in a batch is on the disk, and what is not is counted."""

from surefoot.record.limits import LogLimits
from surefoot.record.messages import Batch, DeviceRow, Event, LayerRows, StepRow
from surefoot.record.reading import load_run
from surefoot.record.store import Store


def batch(step=3):
    return Batch(
        steps=[StepRow(step, 1.0, loss=0.5)],
        layers=[LayerRows(step, ("a", "b"), {"grad_norm": [1.0, 2.0]})],
        devices=[DeviceRow(1.0, "host", step, {"host_used": 5.0})],
        events=[Event("spike", step, "a spike", 1.0, "warning")],
    )


def test_what_is_written_is_read_back(tmp_path):
    store = Store(tmp_path, LogLimits())
    assert store.write(batch()).messages == 0
    assert store.close().error is None
    run = load_run(tmp_path)
    assert run.scalars["loss"].to_pylist() == [0.5]
    assert run.layers["layer"].to_pylist() == ["a", "b"]
    assert run.device["host_used"].to_pylist() == [5.0]
    assert [event.summary for event in run.events] == ["a spike"]


def test_two_sessions_continue_one_run(tmp_path):
    for step in (3, 4):
        store = Store(tmp_path, LogLimits())
        store.write(batch(step))
        store.close()
    assert load_run(tmp_path).scalars["step"].to_pylist() == [3, 4]


def test_without_the_disk_events_are_kept_and_rows_are_counted_as_lost(tmp_path):
    store = Store(tmp_path, LogLimits())
    assert store.keep_events(batch()) == 3
    store.close()
    run = load_run(tmp_path)
    assert run.scalars.num_rows == 0
    assert [event.summary for event in run.events] == ["a spike"]


def test_a_message_that_makes_no_sense_is_counted_and_costs_no_other(tmp_path):
    store = Store(tmp_path, LogLimits())
    loss = store.write(Batch(layers=[LayerRows(1, ("a",), {"grad_norm": [1.0, 2.0, 3.0]}), *batch().layers]))
    assert loss.messages == 1
    assert loss.error is None
    store.close()
    assert load_run(tmp_path).layers["step"].to_pylist() == [3, 3]


def test_a_folder_that_vanished_is_noticed(tmp_path):
    store = Store(tmp_path / "run", LogLimits())
    assert not store.vanished()
    (tmp_path / "run").rename(tmp_path / "moved")
    assert store.vanished()
    store.release()
