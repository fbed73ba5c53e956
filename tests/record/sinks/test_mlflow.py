"""What MLflow's own client finds in the sqlite database."""

from __future__ import annotations

import math
import re

import pytest
from sink_batches import INF, NAN, event, healthy, step, strange

import surefoot as sf
from patience import HANG_SECONDS
from surefoot.record.messages import Batch
from surefoot.record.sinks.runner import SinkRunner

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # SQLAlchemy and MLflow warn of each other


@pytest.fixture
def store(tmp_path, ready_database):
    return ready_database(tmp_path)


@pytest.fixture
def client(store):
    from mlflow.tracking import MlflowClient

    return MlflowClient(store)


def write(store, *batches, **settings):
    sink = sf.MLflowSink(store, **settings)
    for batch in batches:
        sink.write(batch)
    sink.close()
    return sink.run_id


def curve(client, run, name):
    return [(item.step, item.value) for item in client.get_metric_history(run, name)]


def test_every_measured_number_is_a_metric_with_its_step_and_time(store, client):
    run = write(store, healthy(), healthy(5))
    assert curve(client, run, "loss") == [(i, pytest.approx(1 / (i + 1))) for i in range(10)]
    assert curve(client, run, "signal/kl") == [(i, 0.5) for i in range(10)]
    assert curve(client, run, "layer_grad_norm/fc.weight") == [(0, 0.5)]
    assert curve(client, run, "histogram_weight_nonfinite/fc.weight") == [(0, 2.0), (5, 2.0)]
    assert curve(client, run, "events/skip") == [(4, 1.0), (9, 2.0)]
    assert client.get_metric_history(run, "loss")[1].timestamp == 1_700_000_001_000
    assert "loss_scale" not in client.get_run(run).data.metrics


def test_nan_is_kept_and_inf_is_the_largest_float(store, client):
    run = write(store, Batch(steps=[step(1, NAN), step(2, INF), step(3, -INF)]))
    (_, first), *rest = curve(client, run, "loss")
    assert math.isnan(first)
    assert [value > 1e308 for _, value in rest] == [True, False]
    assert rest[1][1] < -1e308


def test_parts_are_metrics_of_their_own(store, client):
    run = write(store, Batch(steps=[step(500, 1.0, "critic"), step(100, 2.0, "generator")]))
    assert curve(client, run, "critic/loss") == [(500, 1.0)]
    assert curve(client, run, "generator/loss") == [(100, 2.0)]


def test_events_are_tags_and_a_halted_run_has_failed(store, client):
    halt = event("halt", 7, "every attempt is used up", severity="error")
    run = client.get_run(write(store, Batch(events=[halt, event(number=9)]), run_name="mine", tags={"team": "a"}))
    assert run.data.tags["surefoot.last_event"] == "skip: step 9: a NaN gradient"
    assert run.data.tags["surefoot.last_error"] == "halt: step 7: every attempt is used up"
    assert (run.info.status, run.info.run_name, run.data.tags["team"]) == ("FAILED", "mine", "a")


def test_two_runs_share_an_experiment_and_finish(store, client):
    first, second = (client.get_run(write(store, healthy(), experiment="exp")) for _ in range(2))
    assert first.info.run_id != second.info.run_id
    assert first.info.experiment_id == second.info.experiment_id
    assert first.info.status == "FINISHED"


def test_a_run_that_is_given_is_written_to_and_left_open(store, client):
    run = client.create_run("0", run_name="own").info.run_id
    assert write(store, Batch(steps=[step(1, 5.0)]), run_id=run) == run
    assert curve(client, run, "loss") == [(1, 5.0)]
    assert client.get_run(run).info.status == "RUNNING"


def test_names_that_mlflow_refuses_are_changed_and_stay_apart(store, client):
    names = ("a<b", "a>b", "a_b", "a//b", "/a", "x" * 400 + "1", "x" * 400 + "2", "..", "漢字")
    run = write(store, Batch(steps=[step(i, None, signals={name: float(i)}) for i, name in enumerate(names)]))
    metrics = client.get_run(run).data.metrics
    found = {value: name for name, value in metrics.items() if name.startswith("signal")}
    assert sorted(found) == list(range(len(names)))
    assert found[2.0] == "signal/a_b"
    assert re.fullmatch(r"signal/a_b-[0-9a-f]{8}", found[0.0])
    assert all(len(name) <= 250 for name in metrics)


def test_strange_batches_and_more_metrics_than_one_call_takes_arrive(store, client):
    many = Batch(steps=[step(i, 1.0) for i in range(700)])
    run = write(store, *strange(), many)
    assert {number for number, _ in curve(client, run, "loss")} >= set(range(700))


def test_a_database_that_cannot_be_opened_is_a_warning_and_no_error(tmp_path, caplog):
    (tmp_path / "broken.db").write_text("this is no database")
    runner = SinkRunner(sf.MLflowSink(f"sqlite:///{tmp_path}/broken.db"), attempts=2, pause_seconds=0.01)
    runner.offer(healthy())
    runner.flush(HANG_SECONDS)
    runner.close(HANG_SECONDS)
    ours = [record for record in caplog.records if record.name == "surefoot"]
    assert runner.given_up
    assert len(ours) == 2
    assert "MLflowSink failed" in ours[0].message
