"""What the writer of the run log makes of messages before they reach the disk. `test_log*.py` have the thread."""

import pytest

from patience import HANG_SECONDS
from surefoot.core.folder_lock import hold
from surefoot.record.limits import LogLimits
from surefoot.record.messages import Event, LayerRows, StepRow
from surefoot.record.reading import load_run
from surefoot.record.writer import BatchBuilder, Disk, RowSource, Writer


def step(number, **columns):
    return ("", StepRow(number, float(number), **columns))


def names(batch):
    return [event.event for event in batch.events]


def test_messages_are_sorted_by_kind_and_strangers_counted():
    layers = LayerRows(1, ("a",), {"grad_norm": [1.0]})
    batch, strangers = BatchBuilder().build([step(1), ("", layers), ("", "what is this"), step(2)])
    assert [row.step for row in batch.steps] == [1, 2]
    assert batch.layers == [layers]
    assert strangers == 1


def test_a_message_carries_the_part_that_took_it():
    batch, _ = BatchBuilder().build([("critic", StepRow(1, 1.0)), ("critic", StepRow(1, 1.0, part="own"))])
    assert [row.part for row in batch.steps] == ["critic", "own"]


def test_an_alarm_without_a_step_happened_at_the_step_the_run_is_at():
    builder = BatchBuilder()
    builder.build([step(41)])
    batch, _ = builder.build([("", Event("alarm", None, "hot", 1.0)), ("", Event("start", None, "begun", 1.0))])
    assert [event.step for event in batch.events] == [41, None]


def test_the_end_is_added_once_and_names_the_error():
    builder = BatchBuilder()
    batch, _ = builder.build([step(7)])
    (event,) = builder.with_end(batch, ValueError("no")).events
    assert (event.event, event.step, event.severity) == ("end", 7, "error")
    assert event.summary == "the program ended with ValueError: no"
    ended, _ = builder.build([("", Event("end", 7, "done", 1.0))])
    assert names(builder.with_end(ended, None)) == ["end"]


def test_a_log_without_a_step_has_no_end():
    builder = BatchBuilder()
    batch, _ = builder.build([])
    assert names(builder.with_end(batch, None)) == []


def test_drops_are_reported_with_their_number_and_at_growing_intervals():
    builder = BatchBuilder()
    batch, _ = builder.build([])
    first = builder.with_drops(batch, 5, closing=False)
    assert first.events[0].evidence == {"dropped": 5}
    assert names(builder.with_drops(batch, 9, closing=False)) == []
    assert builder.with_drops(batch, 9, closing=True).events[0].evidence == {"dropped": 4}


@pytest.fixture
def writer(tmp_path):
    made = Writer(tmp_path, (), LogLimits(), hold(tmp_path, "log"))
    yield made
    made.close(HANG_SECONDS)


def test_what_waits_is_on_the_disk_after_a_flush(writer, tmp_path):
    writer.waiting.append(step(3, loss=1.5))
    assert writer.flush(HANG_SECONDS)
    assert load_run(tmp_path).scalars["loss"].to_pylist() == [1.5]


def test_a_source_that_fails_is_not_asked_again(writer, caplog):
    asked = []
    writer.sources.append(RowSource(lambda: asked.append(1) or 1 / 0, every_seconds=0.0))
    assert writer.flush(HANG_SECONDS)
    assert writer.flush(HANG_SECONDS)
    assert asked == [1]
    assert writer.sources == []
    assert "failed and is no longer called" in caplog.text


def test_after_the_end_nothing_has_room(writer):
    writer.close(HANG_SECONDS)
    assert writer.closed
    assert not writer.has_room_for_event()
    assert not writer.flush(HANG_SECONDS)


def test_a_disk_that_fails_is_reported_once_and_messages_are_counted(tmp_path, caplog):
    (tmp_path / "run").write_text("in the way")
    disk = Disk(tmp_path / "run", LogLimits())
    disk.open()
    batch, _ = BatchBuilder().build([step(1), step(2)])
    assert disk.write(batch, patient=False) == 2
    assert not disk.works
    assert caplog.text.count("cannot be written") == 1
    (tmp_path / "run").unlink()
    assert disk.write(batch, patient=False) == 0
    assert disk.works
    disk.close()


def test_a_run_that_had_ended_and_is_started_again_ends_again_without_a_step():
    builder = BatchBuilder()
    batch, _ = builder.build([("", Event("resume", 600, "continues", 1.0))])
    ended = builder.with_end(batch, None)
    assert [(event.event, event.step) for event in ended.events] == [("resume", 600), ("end", 600)]
