"""What is in the file that W&B writes offline, and would upload: read with W&B's own messages."""

from __future__ import annotations

import json
import math
import socket
import struct
import subprocess
import sys

import pytest
from sink_batches import INF, NAN, event, healthy, histogram, step

import patience
import surefoot as sf
from surefoot.record.bins import COUNT, EDGES
from surefoot.record.messages import Batch

BLOCK_BYTES = 32768
HEADER = struct.Struct("<IHB")
FULL, LAST = 1, 4


@pytest.fixture(scope="module", autouse=True)
def _wandb():
    """It is imported when the first test of this file runs: every worker collects every file."""
    global wandb, wandb_internal_pb2
    import wandb
    from wandb.proto import wandb_internal_pb2


def records(folder):
    """The records of the one offline run under `folder`, once W&B's helper process has written the last of them."""
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    found = []

    def is_over():
        found[:] = framed(path.read_bytes())
        return any(record.WhichOneof("record_type") == "exit" for record in found)

    patience.wait_until(is_over, lambda: "the run never ended")
    return found


def framed(data):
    """The framing is that of a LevelDB log, after seven bytes. The last record may be incomplete."""
    at, gathered = 7, b""
    while at + HEADER.size <= len(data):
        room = BLOCK_BYTES - at % BLOCK_BYTES
        if room < HEADER.size:
            at += room
            continue
        _, length, kind = HEADER.unpack_from(data, at)
        if at + HEADER.size + length > len(data):
            return
        gathered += data[at + HEADER.size : at + HEADER.size + length]
        at += HEADER.size + length
        if kind in (FULL, LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(gathered)
            yield record
            gathered = b""


def rows(folder):
    """The logged rows, by name; nested values as `name.field`."""
    return [
        {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in records(folder)
        if record.WhichOneof("record_type") == "history"
    ]


def step_metrics(folder):
    return {
        record.metric.name or record.metric.glob_name: record.metric.step_metric
        for record in records(folder)
        if record.WhichOneof("record_type") == "metric"
    }


def write(folder, *batches, **settings):
    sink = sf.WandbSink("surefoot-tests", mode="offline", dir=str(folder), **settings)
    for batch in batches:
        sink.write(batch)
    sink.close()


def curve(folder, name, part=""):
    return [(row[f"{part}step"], row[name]) for row in rows(folder) if name in row]


def test_every_measured_number_is_a_curve(tmp_path):
    write(tmp_path, healthy())
    assert curve(tmp_path, "loss") == [(i, pytest.approx(1 / (i + 1))) for i in range(5)]
    assert curve(tmp_path, "signal/kl") == [(i, 0.5) for i in range(5)]
    assert curve(tmp_path, "layer_grad_norm/fc.weight") == [(0, 0.5)]
    assert curve(tmp_path, "device/host/host_used") == [(4, 1e9)]
    assert curve(tmp_path, "histogram_weight_nonfinite/fc.weight") == [(0, 2)]
    assert not curve(tmp_path, "loss_scale")


def test_nan_and_inf_are_kept(tmp_path):
    write(tmp_path, Batch(steps=[step(1, NAN), step(2, INF), step(3, -INF)]))
    (_, first), *rest = curve(tmp_path, "loss")
    assert math.isnan(first)
    assert rest == [(2, INF), (3, -INF)]


def test_steps_that_go_back_and_parts_that_count_apart_lose_no_row(tmp_path):
    steps = [step(500, 1.0, "critic"), step(100, 2.0, "generator"), step(501, 3.0, "critic")]
    write(tmp_path, Batch(steps=[step(7), step(8), step(6), *steps]))
    assert [number for number, _ in curve(tmp_path, "loss")] == [7, 8, 6]
    assert curve(tmp_path, "critic/loss", "critic/") == [(500, 1.0), (501, 3.0)]
    assert curve(tmp_path, "generator/loss", "generator/") == [(100, 2.0)]
    assert all("step" not in row for row in rows(tmp_path) if "critic/loss" in row)
    axes = step_metrics(tmp_path)
    assert (axes["loss"], axes["critic/loss"], axes["generator/loss"]) == ("step", "critic/step", "generator/step")
    numbers = [row["_step"] for row in rows(tmp_path) if "_step" in row]
    assert numbers == sorted(set(numbers))


def test_names_with_dots_get_their_axis_through_their_group(tmp_path):
    write(tmp_path, healthy())
    axes = step_metrics(tmp_path)
    assert axes["layer_grad_norm/*"] == axes["histogram_weight/*"] == "step"
    assert not [name for name in axes if "." in name]


def test_a_histogram_has_our_counts_and_edges(tmp_path):
    write(tmp_path, Batch(histograms=[histogram(4)]))
    (row,) = [row for row in rows(tmp_path) if "histogram_weight/fc.weight.values" in row]
    assert row["step"] == 4
    assert row["histogram_weight/fc.weight.values"] == histogram().counts
    assert row["histogram_weight/fc.weight.bins"] == pytest.approx(list(EDGES))
    assert len(row["histogram_weight/fc.weight.bins"]) == COUNT + 1


def test_events_are_text_and_counts_and_severe_ones_alert(tmp_path):
    write(tmp_path, Batch(events=[event(), event("halt", 9, "enough", severity="error", cause="c" * 99)]))
    assert curve(tmp_path, "events/log") == [(3, "step 3: a NaN gradient"), (9, f"step 9: enough (cause: {'c' * 99})")]
    assert curve(tmp_path, "events/skip") == [(3, 1)]
    alerts = [record.alert for record in records(tmp_path) if record.WhichOneof("record_type") == "alert"]
    assert [(alert.level, alert.text[:14], len(alert.title)) for alert in alerts] == [("ERROR", "step 9: enough", 63)]


def test_a_run_that_is_given_is_written_to_and_left_open(tmp_path):
    run = wandb.init(mode="offline", dir=str(tmp_path), settings=wandb.Settings(console="off", silent=True))
    sink = sf.WandbSink(run=run)
    sink.write(Batch(steps=[step(1, 5.0)]))
    sink.close()
    run.log({"mine": 1})
    run.finish()
    assert curve(tmp_path, "loss") == [(1, 5.0)]
    assert [row["mine"] for row in rows(tmp_path) if "mine" in row] == [1]


def test_a_run_of_the_users_own_is_not_touched(tmp_path):
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    for folder in (theirs, ours):
        folder.mkdir()
    run = wandb.init(mode="offline", dir=str(theirs), settings=wandb.Settings(console="off", silent=True))
    write(ours, Batch(steps=[step(1, 5.0)]))
    assert wandb.run is run
    wandb.log({"mine": 1})
    run.finish()
    assert curve(ours, "loss") == [(1, 5.0)]
    assert [set(row) & {"mine", "loss"} for row in rows(theirs)] == [{"mine"}]


SCRIPT = """
import sys, time
import surefoot as sf
import surefoot.record.log
import surefoot.record.writer
from surefoot.record.messages import StepRow
surefoot.record.log.EXIT_SECONDS = surefoot.record.writer.SINK_SECONDS = 1e6  # W&B takes its time on a busy machine
log = sf.RunLog(sys.argv[1] + "/log", sinks=[sf.WandbSink(dir=sys.argv[1])])
for number in range(20):
    log.take(StepRow(number, time.time(), loss=1.0))
"""


def test_offline_nothing_reaches_the_network_and_the_last_rows_are_in_at_exit(tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "ALL_PROXY", "WANDB_BASE_URL"):
            monkeypatch.setenv(name, address)
        monkeypatch.delenv("NO_PROXY")
        monkeypatch.setenv("WANDB_MODE", "offline")
        patience.run([sys.executable, "-c", SCRIPT, tmp_path], check=True, stdin=subprocess.DEVNULL)
        with pytest.raises(TimeoutError):
            server.accept()
    assert [number for number, _ in curve(tmp_path, "loss")] == list(range(20))


def test_without_credentials_it_says_so_and_asks_for_nothing(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    code = "import surefoot as sf\ntry: sf.WandbSink()\nexcept sf.UsageError as error: print(error)"
    done = patience.run([sys.executable, "-c", code], check=True)
    assert "wandb login" in done.stdout
    assert "mode=" in done.stdout
