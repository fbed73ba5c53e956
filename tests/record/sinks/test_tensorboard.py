"""What TensorBoard's own reader finds in what was written."""

from __future__ import annotations

import math
import os
import resource
import signal

import pytest
from sink_batches import INF, NAN, event, healthy, histogram, step, strange

import surefoot as sf
from surefoot.record.bins import EDGES, ZERO
from surefoot.record.messages import Batch, LayerRows


def read(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # every worker collects this

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0, "tensors": 0})
    found.Reload()
    return found


def written(folder, *batches, **settings):
    sink = sf.TensorBoardSink(folder, **settings)
    for batch in batches:
        sink.write(batch)
    sink.close()
    return read(folder)


def curve(found, tag):
    return [(item.step, item.value) for item in found.Scalars(tag)]


def test_every_measured_number_is_a_curve_and_what_was_not_measured_is_none(tmp_path):
    found = written(tmp_path, healthy())
    assert set(found.Tags()["scalars"]) == {
        "loss",
        "grad_norm",
        "lr",
        "skipped",
        "signal/kl",
        "layer_grad_norm/fc.weight",
        "layer_grad_norm/fc.bias",
        "layer_update_ratio/fc.weight",
        "layer_update_ratio/fc.bias",
        "histogram_weight_nonfinite/fc.weight",
        "device/host/host_used",
        "events/skip",
    }
    assert curve(found, "loss") == [(i, pytest.approx(1 / (i + 1))) for i in range(5)]
    assert found.Scalars("loss")[2].wall_time == 1_700_000_002.0
    assert curve(found, "histogram_weight_nonfinite/fc.weight") == [(0, 2.0)]


def test_nan_and_inf_are_kept(tmp_path):
    found = written(tmp_path, Batch(steps=[step(1, NAN), step(2, INF), step(3, -INF), step(4, 1.0)]))
    values = [value for _, value in curve(found, "loss")]
    assert math.isnan(values[0])
    assert values[1:] == [INF, -INF, 1.0]


def test_parts_have_curves_of_their_own_and_their_own_steps(tmp_path):
    found = written(
        tmp_path, Batch(steps=[step(10, 1.0, "critic"), step(2, 3.0, "generator"), step(11, 2.0, "critic")])
    )
    assert curve(found, "critic/loss") == [(10, 1.0), (11, 2.0)]
    assert curve(found, "generator/loss") == [(2, 3.0)]


def test_a_histogram_has_the_counts_and_edges_of_ours(tmp_path):
    found = written(tmp_path, Batch(histograms=[histogram(4)]))
    (item,) = found.Histograms("histogram_weight/fc.weight")
    value = item.histogram_value
    assert item.step == 4
    assert (value.num, value.min, value.max) == (12.0, EDGES[ZERO - 1], EDGES[ZERO + 31])
    assert [count for count in value.bucket if count] == [3.0, 4.0, 5.0]
    assert value.bucket_limit[-1] == EDGES[ZERO + 31]


def test_events_are_text_and_are_counted(tmp_path):
    found = written(tmp_path, Batch(events=[event(severity="error", cause="nonfinite"), event(number=None)]))
    texts = [item.tensor_proto.string_val[0].decode() for item in found.Tensors("events/log")]
    assert texts[0] == "**error** `skip` step 3: a NaN gradient (cause: nonfinite)"
    assert [value for _, value in curve(found, "events/skip")] == [1.0, 2.0]


def test_thinning_keeps_every_nth_step_and_each_that_is_broken_or_follows_a_rollback(tmp_path):
    steps = [step(i, skipped=i == 13) for i in range(25)] + [step(20)]
    layers = [LayerRows(i, ("a",), {"grad_norm": [1.0]}) for i in range(25)]
    layers += [LayerRows(i, ("m",), {"dead_share": [0.0]}) for i in (3, 7)]
    found = written(tmp_path, Batch(steps=steps, layers=layers), every_steps=10, layers_every_steps=20)
    assert [number for number, _ in curve(found, "loss")] == [0, 10, 13, 20, 20]
    assert [number for number, _ in curve(found, "layer_grad_norm/a")] == [0, 20]
    assert [number for number, _ in curve(found, "layer_dead_share/m")] == [3]


def test_a_batch_that_is_tried_again_counts_its_events_once(tmp_path):
    batch = Batch(events=[event()])
    found = written(tmp_path, batch, batch)
    assert [value for _, value in curve(found, "events/skip")] == [1.0, 1.0]


def test_a_resumed_run_takes_over_from_where_it_continued(tmp_path):
    written(tmp_path, Batch(steps=[step(i, 1.0) for i in range(10)]))
    found = written(tmp_path, Batch(steps=[step(i, 2.0) for i in range(6, 9)]))
    assert curve(found, "loss") == [(i, 1.0) for i in range(6)] + [(i, 2.0) for i in range(6, 9)]


def test_each_batch_can_be_read_while_the_run_continues(tmp_path):
    sink = sf.TensorBoardSink(tmp_path)
    for number in range(3):
        sink.write(Batch(steps=[step(number)]))
        assert len(read(tmp_path).Scalars("loss")) == number + 1
    sink.close()


def test_a_write_that_fails_half_way_leaves_a_file_that_can_be_read_and_continues(tmp_path):
    sink = sf.TensorBoardSink(tmp_path)
    sink.write(Batch(steps=[step(0)]))
    (file,) = tmp_path.iterdir()
    size = file.stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 50, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            sink.write(Batch(steps=[step(i) for i in range(1, 9)]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert os.path.getsize(file) == size
    sink.write(Batch(steps=[step(9)]))
    sink.close()
    assert [number for number, _ in curve(read(tmp_path), "loss")] == [0, 9]


def test_strange_names_come_back_as_they_are(tmp_path):
    tags = written(tmp_path, *strange()).Tags()["scalars"]
    assert {"signal/漢字/é", "signal/<img src=x onerror=alert(1)>", "signal/" + "x" * 5000} <= set(tags)
