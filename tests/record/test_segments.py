"""The files of a table: appended to, and readable up to their last complete batch."""

import pyarrow as pa
import pytest

from surefoot.record.encode import Encoder
from surefoot.record.messages import StepRow
from surefoot.record.segments import FOLDER, Segment, SegmentName, level_rank, read_segment, segments_in


def batch(*steps):
    return Encoder(0).encode("scalars", [StepRow(step, float(step)) for step in steps])


def steps_in(path):
    rows, wrong = read_segment(path, "scalars")
    return (None if rows is None else rows["step"].to_pylist()), wrong


def test_a_name_says_table_session_level_and_number():
    name = SegmentName("scalars", 3, "e", 12)
    assert str(name) == "scalars-003-e-00012.arrows"
    assert SegmentName.parse(str(name)) == name
    assert SegmentName.parse("scalars-3-e-12.arrows") is None
    assert SegmentName.parse("notes.txt") is None


def test_segments_are_listed_most_thinned_first_then_by_age(tmp_path):
    (tmp_path / FOLDER).mkdir()
    for name in ("scalars-000-0-00001", "scalars-000-0-00000", "scalars-001-1-00000", "scalars-000-e-00000"):
        (tmp_path / FOLDER / f"{name}.arrows").touch()
    assert [f"{name.level}{name.number}" for name in segments_in(tmp_path)] == ["e0", "10", "00", "01"]
    assert level_rank("e") > level_rank("5") > level_rank("0")
    assert list(segments_in(tmp_path / "missing")) == []


@pytest.mark.parametrize("compress", [False, True])
def test_batches_are_readable_before_the_file_is_closed(tmp_path, compress):
    segment = Segment(tmp_path / "s", batch(0).schema, compress)
    segment.append(batch(1, 2))
    segment.append(batch(3))
    assert steps_in(tmp_path / "s")[0] == [1, 2, 3]
    segment.close()
    assert steps_in(tmp_path / "s") == ([1, 2, 3], "")
    assert (segment.rows, segment.size) == (3, (tmp_path / "s").stat().st_size)


def test_a_torn_last_batch_is_dropped_and_named(tmp_path):
    segment = Segment(tmp_path / "s", batch(0).schema)
    segment.append(batch(1, 2))
    whole = segment.size
    segment.append(batch(3))
    segment.abandon()
    content = (tmp_path / "s").read_bytes()
    (tmp_path / "s").write_bytes(content[: whole + 20])
    steps, wrong = steps_in(tmp_path / "s")
    assert steps == [1, 2]
    assert wrong.startswith("s: ")


def test_a_file_of_another_table_is_refused(tmp_path):
    schema = pa.schema([("step", pa.string())])
    with pa.ipc.new_stream(str(tmp_path / "s"), schema) as stream:
        stream.write_batch(pa.record_batch([["x"]], schema=schema))
    assert steps_in(tmp_path / "s") == (None, "s: its columns are not those of `scalars`")


def test_a_file_that_is_there_is_never_overwritten(tmp_path):
    (tmp_path / "s").write_text("precious")
    with pytest.raises(FileExistsError):
        Segment(tmp_path / "s", batch(0).schema)
    assert (tmp_path / "s").read_text() == "precious"
