"""The run log as the training loop sees it: what is taken comes back, and nothing it does is felt."""

import math
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import surefoot
from counted import calls
from patience import HANG_SECONDS, wait_until
from quiet_log import QuietLog
from runlogs import event, layer_rows, run, step_row, warnings
from surefoot import load_run
from surefoot.record import bins
from surefoot.record.messages import DeviceRow, Histogram, LayerRows, StepRow
from surefoot.record.schema import LAYER_NUMBERS, STEP_NUMBERS
from surefoot.record.writer import WAITING_EVENTS, WAITING_MESSAGES

ANY_FLOAT = st.none() | st.floats() | st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -0.0, 5e-324])


def same(one, other):
    """Equal, where NaN equals NaN, null equals null, and neither equals the other."""
    if one is None or other is None:
        return one is other
    return (math.isnan(one) and math.isnan(other)) or (
        one == other and math.copysign(1, one) == math.copysign(1, other)
    )


def logged(folder, *messages, **options):
    with QuietLog(folder, **options) as log:
        for message in messages:
            log.take(message)
    return load_run(folder)


@given(st.lists(st.tuples(*[ANY_FLOAT] * len(STEP_NUMBERS), ANY_FLOAT), min_size=1, max_size=20))
def test_nan_inf_and_what_was_not_measured_come_back_as_they_were(tmp_path_factory, rows):
    messages = [
        StepRow(step, 0.0, **dict(zip(STEP_NUMBERS, numbers, strict=True)), signals={"kl": signal})
        for step, (*numbers, signal) in enumerate(rows)
    ]
    table = logged(tmp_path_factory.mktemp("run"), *messages).scalars
    columns = [table[name].to_pylist() for name in (*STEP_NUMBERS, "signal.kl")]
    got = [number for row in zip(*columns, strict=True) for number in row]
    assert all(map(same, got, [number for row in rows for number in row]))


@given(st.lists(st.floats(width=32), min_size=1, max_size=9), st.sampled_from(["numpy", "torch", "list"]))
def test_layers_come_back_in_the_order_of_the_model_from_arrays_and_tensors(tmp_path_factory, values, kind):
    make = {"numpy": lambda v: np.array(v, np.float32), "torch": torch.tensor, "list": list}[kind]
    names = [f"layer {9 - index}" for index in range(len(values))]
    message = LayerRows(3, names, {"param_norm": make(values)}, part="generator")
    table = logged(tmp_path_factory.mktemp("run"), message).layers
    assert table["layer"].to_pylist() == names
    assert all(same(*pair) for pair in zip(table["param_norm"].to_pylist(), values, strict=True))
    assert table["update_ratio"].null_count == len(values)
    assert set(table["part"].to_pylist()) == {"generator"}


def test_tensors_of_other_types_and_with_a_graph_are_taken_too(tmp_path):
    columns = {
        "grad_norm": torch.tensor([1.0, math.nan], dtype=torch.bfloat16),
        "nonfinite": torch.tensor([0, 7]),
        "param_norm": torch.tensor([1.5, 2.5], requires_grad=True),
        "update_ratio": np.array([1e300, -1e300]),
    }
    rows = logged(tmp_path, LayerRows(0, ("a", "b"), columns)).layers.to_pylist()
    assert (
        rows[0] | {"step": 0, "part": "", "layer": "a", "grad_norm": 1.0, "nonfinite": 0, "param_norm": 1.5} == rows[0]
    )
    assert math.isnan(rows[1]["grad_norm"])
    assert [row["update_ratio"] for row in rows] == [math.inf, -math.inf]


def test_everything_that_can_be_logged_comes_back_in_its_table(tmp_path):
    counts = list(range(bins.COUNT))
    run = logged(
        tmp_path,
        step_row(1),
        step_row(0, signals={"entropy": 2.0}),
        step_row(0, part="critic"),
        layer_rows(0),
        LayerRows(0, ["block"], {"dead_share": [0.25]}),
        Histogram(0, "weight", "fc", counts, nan=1, positive_inf=2, negative_inf=3),
        DeviceRow(5.0, "cuda:0", None, {"temperature": 61.0}),
        event(1, evidence={"loss": math.nan, "where": ["fc"]}),
    )
    assert [(row["step"], row["part"]) for row in run.scalars.to_pylist()] == [(0, ""), (0, "critic"), (1, "")]
    assert run.scalars["signal.entropy"].to_pylist() == [2.0, None, None]
    assert run.layers["layer"].to_pylist()[-1] == "block"
    assert run.histograms.to_pylist() == [
        {"step": 0, "part": "", "kind": "weight", "layer": "fc", "counts": counts, "nan": 1}
        | {"positive_inf": 2, "negative_inf": 3}
    ]
    device = run.device.to_pylist()[0]
    assert (device["source"], device["step"], device["temperature"], device["power"]) == ("cuda:0", 0, 61.0, None)
    assert [(each.event, each.step, each.evidence) for each in run.events] == [
        ("spike", 1, {"loss": "nan", "where": ["fc"]}),
        ("end", 0, {}),
    ]
    assert (run.dropped, run.problems, run.findings, run.run) == (0, [], None, {})


def test_a_part_shares_the_log_and_names_what_it_takes(tmp_path):
    log = QuietLog(tmp_path)
    critic = log.part("critic")
    critic.take(step_row(1))
    critic.take(step_row(2, part="own"))
    critic.event("spike", 2, "high")
    critic.close()
    log.take(step_row(3))
    log.close()
    run = load_run(tmp_path)
    assert run.scalars["part"].to_pylist() == ["critic", "own", ""]
    assert run.events[0].part == "critic"


def test_taking_a_message_is_a_handful_of_calls_and_takes_no_lock(tmp_path):
    row = step_row(1)
    with QuietLog(tmp_path) as log, calls() as made:
        log.take(row)
    assert made[: made.index("append") + 1] == ["take", "len", "append"]
    assert log.dropped == 0


def log_whose_writer_waits(folder):
    """A log that writes nothing until the event is set."""
    log, hold = QuietLog(folder), threading.Event()
    log.flush(HANG_SECONDS)
    log.sample(lambda: hold.wait(HANG_SECONDS) and (), every_seconds=1e9)
    wait_until(lambda: log._writer.sources[0].due != 0.0)
    return log, hold


def test_what_does_not_fit_is_dropped_counted_and_told(tmp_path):
    log, hold = log_whose_writer_waits(tmp_path)
    for step in range(WAITING_MESSAGES + 500):
        log.take(step_row(step))
    assert log.dropped == 500
    hold.set()
    log.close()
    run = load_run(tmp_path)
    assert (run.dropped, run.scalars.num_rows) == (500, WAITING_MESSAGES)
    assert [(each.event, each.evidence) for each in run.events] == [("drops", {"dropped": 500}), ("end", {})]


def test_an_event_still_fits_when_rows_do_not(tmp_path):
    log, hold = log_whose_writer_waits(tmp_path)
    for step in range(WAITING_MESSAGES + 1):
        log.take(step_row(step))
    for step in range(WAITING_EVENTS + 1):
        log.take(event(step))
    assert log.dropped == 2
    hold.set()
    log.close()


def test_layers_that_wait_are_bounded_by_their_rows(tmp_path, monkeypatch):
    monkeypatch.setattr("surefoot.record.log.WAITING_LAYER_ROWS", 1000)
    log = QuietLog(tmp_path)
    log.flush(HANG_SECONDS)
    for step in range(12):
        log.take(layer_rows(step, layers=100))
    taken = 12 - log.dropped
    log.close()
    assert 10 <= taken <= 12
    assert load_run(tmp_path).layers.num_rows == taken * 100


@pytest.mark.parametrize(
    "strange",
    [
        "no message",
        None,
        StepRow("seven", 0.0),
        StepRow(1 << 70, 0.0),
        LayerRows(1, ["a", "b"], {"grad_norm": [1.0]}),
        LayerRows(1, ["a"], {"grad_norm": ["high"]}),
        LayerRows(1, None, {}),
        Histogram(1, "weight", "a", [1, 2]),
        DeviceRow("now", "host", "here"),
    ],
    ids=repr,
)
def test_a_message_that_makes_no_sense_costs_itself_only(tmp_path, strange):
    log = QuietLog(tmp_path)
    for message in (step_row(1), layer_rows(1), strange, step_row(2), layer_rows(2)):
        log.take(message)
    log.close()
    run = load_run(tmp_path)
    assert run.scalars["step"].to_pylist()[:2] == [1, 2]
    assert run.layers["step"].to_pylist() == [1] * 5 + [2] * 5
    assert log.dropped + run.device.num_rows == 1


def test_a_value_that_is_no_number_is_null_and_its_row_stays(tmp_path):
    rows = logged(tmp_path, step_row(0, loss="high", signals={"kl": object()}), step_row(1, loss=torch.tensor(2.0)))
    assert rows.scalars["loss"].to_pylist() == [None, 2.0]
    assert rows.scalars["signal.kl"].to_pylist() == [None, None]
    assert rows.scalars["lr"].to_pylist() == [0.5, 0.5]


def test_a_signal_of_a_new_name_every_step_does_not_become_a_column_every_step(tmp_path, caplog):
    run = logged(tmp_path, *(step_row(step, signals={f"at {step}": 1.0}) for step in range(400)))
    assert run.scalars.num_rows == 400
    assert 200 < run.scalars.num_columns < 300
    assert len(warnings(caplog)) == 1


def test_what_is_taken_after_the_end_is_dropped(tmp_path):
    log = QuietLog(tmp_path)
    log.close()
    log.take(step_row(1))
    log.close()
    assert (log.dropped, log.flush(1.0)) == (1, False)


def test_a_source_is_asked_now_and_then_and_one_that_raises_no_more(tmp_path, caplog):
    asked = []
    log = QuietLog(tmp_path)
    log.sample(lambda: asked.append(1) or [DeviceRow(float(len(asked)), "host")], every_seconds=0.0)
    log.sample(lambda: 1 / 0, every_seconds=0.0)
    for _ in range(3):
        log.flush(HANG_SECONDS)
    log.close()
    assert load_run(tmp_path).device.num_rows == len(asked) >= 3
    assert len(warnings(caplog)) == 1
    assert "ZeroDivisionError" in warnings(caplog)[0]


class Kept:
    def __init__(self):
        self.batches, self.closed = [], False

    def write(self, batch):
        self.batches.append(batch)

    def close(self):
        self.closed = True


def test_sinks_get_all_that_is_logged(tmp_path):
    sink = Kept()
    logged(tmp_path, *(step_row(step) for step in range(100)), layer_rows(3), event(4), sinks=[sink])
    assert [row.step for batch in sink.batches for row in batch.steps] == list(range(100))
    assert sum(len(batch.layers) for batch in sink.batches) == 1
    assert [event.event for batch in sink.batches for event in batch.events] == ["spike", "end"]
    assert sink.closed


def test_a_program_that_ends_or_raises_leaves_a_whole_log(tmp_path):
    code = """
    log = RunLog(sys.argv[1])
    for step in range(1000):
        log.take(step_row(step))
    log.event("end", 999, "done")
    assert "torch" not in sys.modules
    if sys.argv[2] == "raises":
        raise RuntimeError
    """
    for how in ("ends", "raises"):
        done = run(code, tmp_path / how, how)
        assert done.returncode == (how == "raises"), done.stderr
        tables = load_run(tmp_path / how)
        assert (tables.scalars.num_rows, len(tables.events), tables.problems) == (1000, 1, [])


def test_a_fork_neither_writes_nor_waits(tmp_path):
    code = """
    log = RunLog(sys.argv[1])
    log.take(step_row(0))
    log.flush(HANG_SECONDS)
    log.take(step_row(1))
    if (child := os.fork()) == 0:
        log.take(step_row(2))
        assert not log.flush(1e6)
        log.close(1e6)
        sys.exit(0)  # runs what is registered for the end of the program, which must not write
    assert os.waitpid(child, 0)[1] == 0
    log.take(step_row(3))
    """
    done = run(code, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert load_run(tmp_path).scalars["step"].to_pylist() == [0, 1, 3]


def test_a_sink_that_hangs_cannot_hold_the_end_of_the_program(tmp_path):
    code = """
    import surefoot.record.log as module
    with RunLog(os.path.join(sys.argv[1], "first")) as first:  # pyarrow imports pandas, if there is one, to write
        first.take(step_row(0))
    module.EXIT_SECONDS = 1.0
    class Hangs:
        def write(self, batch): time.sleep(1e6)
        def close(self): pass
    log = RunLog(sys.argv[1], sinks=[Hangs()])
    log.take(step_row(1))
    """
    done = run(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Hangs did not finish in time and is abandoned" in done.stderr
    assert load_run(tmp_path).scalars.num_rows == 1


def test_the_columns_of_an_empty_run_are_there(tmp_path):
    run = logged(tmp_path)
    assert run.layers.schema.names == ["step", "part", "layer", *LAYER_NUMBERS]
    assert (run.scalars.num_rows, run.device.num_rows, run.histograms.num_rows) == (0, 0, 0)
    assert surefoot.RunTables is type(run)


def test_sources_are_asked_once_more_at_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr("surefoot.record.writer.LAST_READING_SECONDS", 0.0)
    asked = []
    with surefoot.RunLog(tmp_path / "run", device_seconds=None) as log:
        log.sample(lambda: asked.append(1) or [DeviceRow(float(len(asked)), "host")], every_seconds=1e9)
        log.flush(HANG_SECONDS)
    assert surefoot.load_run(tmp_path / "run").device.num_rows == len(asked) == 2


def test_a_run_that_goes_back_supersedes_its_own_rows(tmp_path):
    with QuietLog(tmp_path) as log:
        for step in range(30):
            log.take(StepRow(step, float(step), loss=1.0))
        log.begin_session()
        log.event("rollback", 19, "back to step 20")
        for step in range(20, 25):
            log.take(StepRow(step, 100.0 + step, loss=2.0))
    run = load_run(tmp_path)
    assert run.scalars["step"].to_pylist() == list(range(25))
    assert run.scalars["loss"].to_pylist() == [1.0] * 20 + [2.0] * 5
    assert [event.event for event in run.events if event.event != "start"] == ["rollback", "end"]


def test_another_part_of_the_log_keeps_its_rows_when_one_goes_back(tmp_path):
    with QuietLog(tmp_path) as log:
        critic = log.part("critic")
        for step in range(10):
            log.take(StepRow(step, float(step), loss=1.0))
            critic.take(StepRow(step, float(step), loss=1.0))
        log.begin_session()
        log.take(StepRow(5, 20.0, loss=2.0))
        critic.take(StepRow(10, 20.0, loss=2.0))
    rows = load_run(tmp_path).scalars.to_pydict()
    steps = {part: [s for s, p in zip(rows["step"], rows["part"], strict=True) if p == part] for part in ("", "critic")}
    assert steps == {"": [0, 1, 2, 3, 4, 5], "critic": list(range(11))}
