"""However long the run: the log stays below its limit, recent rows are all there, and so are those near events."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runlogs import event, layer_rows, loss_at, size_of, step_row
from surefoot import SettingError, load_run
from surefoot.record.limits import LogLimits
from surefoot.record.messages import Batch, DeviceRow
from surefoot.record.segments import segments_in
from surefoot.record.store import Store
from surefoot.record.thinning import FACTOR, STEPS_AROUND, EventNeighbourhood, TableThinning

SMALL = LogLimits(scalars_bytes=1 << 19, layers_bytes=1 << 20, histograms_bytes=1 << 16, device_bytes=1 << 19)


def write(folder, steps, *, events=(), every=None, chunk=500, layers=8, limits=SMALL):
    """Log steps straight into a store, as the writer would in many cycles."""
    store = Store(folder, limits)
    for start in range(steps.start, steps.stop, chunk):
        here = range(start, min(start + chunk, steps.stop))
        sampled = [step for step in here if every and step % every == 0]
        happened = [event(step) for step in events if step in here]
        batch = Batch([*map(step_row, here)], [layer_rows(step, layers) for step in sampled], (), (), happened)
        assert store.write(batch).error is None
    store.close()
    return load_run(folder)


def levels(folder, table):
    return {name.level for name in segments_in(folder) if name.table == table}


def test_a_long_run_stays_below_its_limit_at_every_moment(tmp_path):
    events = [20_003, 70_000]
    store, largest = Store(tmp_path, SMALL), dict.fromkeys(("scalars", "layers"), 0)
    for start in range(0, 100_000, 2500):
        here = range(start, start + 2500)
        happened = [event(step) for step in events if step in here]
        layers = [layer_rows(step, 20) for step in here if step % 10 == 0]
        assert store.write(Batch([*map(step_row, here)], layers, (), (), happened)).error is None
        largest = {table: max(most, size_of(tmp_path, table)) for table, most in largest.items()}
    store.close()
    assert 0.2 < largest["scalars"] / SMALL.scalars_bytes < 1.0
    assert 0.2 < largest["layers"] / SMALL.layers_bytes < 1.0
    run = load_run(tmp_path)
    steps = run.scalars["step"].to_numpy()
    assert np.array_equal(run.scalars["loss"].to_numpy(), [loss_at(step) for step in steps.tolist()])
    assert np.all(np.diff(steps) > 0)
    assert set(range(200)) <= set(steps.tolist()), "the beginning"
    assert set(range(99_000, 100_000)) <= set(steps.tolist()), "the end"
    for step in events:
        assert set(range(step - STEPS_AROUND, step + STEPS_AROUND + 1)) <= set(steps.tolist()), "near events"
    gaps = np.diff(steps)
    assert gaps.max() <= 2 * FACTOR**3, "nothing in between is lost altogether"
    assert {1, FACTOR, FACTOR**2} <= set(gaps.tolist())
    layers = run.layers["step"].to_numpy()
    assert len(layers) % 20 == 0, "steps are kept whole"
    assert set(layers.tolist()) >= {70_000, 69_950, 70_050, 0, 99_990}
    assert levels(tmp_path, "scalars") >= {"0", "1", "2", "e"}


def test_one_row_per_write_is_as_small_in_the_end(tmp_path):
    """A slow run writes a batch per step, each with a kilobyte around it."""
    run = write(tmp_path, range(1000), chunk=1, limits=LogLimits(scalars_bytes=1 << 23))
    *closed, _ = sorted((tmp_path / "telemetry").glob("scalars-*"))
    assert len(closed) >= 2
    assert sum(path.stat().st_size for path in closed) < 100_000
    assert run.scalars["step"].to_pylist() == list(range(1000))


def test_the_last_level_is_halved_indefinitely(tmp_path, monkeypatch):
    monkeypatch.setattr("surefoot.record.thinning.LAST_LEVEL", 1)
    run = write(tmp_path, range(60_000), chunk=2000)
    steps = run.scalars["step"].to_numpy()
    assert size_of(tmp_path, "scalars") < SMALL.scalars_bytes / 2
    assert levels(tmp_path, "scalars") == {"0", "1"}
    assert (steps[0], steps[-1]) == (0, 59_999)
    assert np.diff(steps).max() <= 60_000 / 50


def test_a_run_that_is_resumed_again_and_again_is_as_small_as_one_that_ran_through(tmp_path):
    for start in range(0, 30_000, 1500):
        run = write(tmp_path, range(start, start + 1600), events=[start + 700])
        assert size_of(tmp_path, "scalars") < SMALL.scalars_bytes
    steps = run.scalars["step"].to_numpy()
    assert np.all(np.diff(steps) > 0)
    assert np.array_equal(run.scalars["loss"].to_numpy(), [loss_at(step) for step in steps.tolist()])
    assert set(range(100)) <= set(steps.tolist())
    assert set(range(28_500, 30_000)) <= set(steps.tolist())
    assert np.diff(steps).max() < 600


def test_while_its_process_lives_a_session_is_left_alone(tmp_path):
    alive = Store(tmp_path, SMALL)
    alive.write(Batch([*map(step_row, range(1000))]))
    before = {name for name in segments_in(tmp_path) if name.session == 0}
    write(tmp_path, range(1000, 20_000))
    assert before <= set(segments_in(tmp_path))
    alive.write(Batch([step_row(1000)]))
    alive.close()
    assert load_run(tmp_path).problems == []


def test_a_flood_of_events_keeps_the_first_and_the_last_surroundings(tmp_path):
    run = write(tmp_path, range(60_000), events=range(1000, 60_000, 20), chunk=2000)
    steps = run.scalars["step"].to_numpy()
    assert size_of(tmp_path, "scalars") < SMALL.scalars_bytes
    assert set(range(960, 1200)) <= set(steps.tolist())
    assert set(range(55_000, 60_000)) <= set(steps.tolist())


def test_layers_that_are_sampled_at_multiples_of_eight_are_thinned_as_well(tmp_path):
    store = Store(tmp_path, LogLimits(layers_bytes=1 << 19))
    for start in range(0, 3000 * 64, 100 * 64):
        layers = [layer_rows(step, 64) for step in range(start, start + 100 * 64, 64)]
        assert store.write(Batch(layers=layers)).error is None
    store.close()
    assert size_of(tmp_path, "layers") < 1 << 19
    assert levels(tmp_path, "layers") >= {"0", "1", "2"}


def test_readings_of_devices_are_thinned_per_device(tmp_path):
    store = Store(tmp_path, SMALL)
    for start in range(0, 40_000, 2000):
        times = range(start, start + 2000)
        rows = [DeviceRow(float(t), f"cuda:{gpu}", None, {"power": t * math.pi}) for t in times for gpu in range(2)]
        assert store.write(Batch(devices=rows)).error is None
    store.close()
    device = load_run(tmp_path).device
    assert size_of(tmp_path, "device") < SMALL.device_bytes
    assert device["source"].to_pylist().count("cuda:0") == device.num_rows / 2
    assert device["time"].to_pylist() == sorted(device["time"].to_pylist())


@given(st.lists(st.integers(0, 3000), max_size=60), st.randoms())
def test_a_step_is_near_an_event_if_it_is_at_most_fifty_away(steps, random):
    surroundings = EventNeighbourhood()
    for step in steps:
        surroundings.add(step)
    asked = np.arange(-100, 3200)
    expected = [any(abs(step - each) <= STEPS_AROUND for each in steps) for step in asked]
    assert surroundings.near(asked).tolist() == expected


def test_a_limit_that_holds_no_segment_is_refused():
    with pytest.raises(SettingError, match=r"`layers_bytes` must be at least 65,536 bytes.*got 10"):
        LogLimits(layers_bytes=10)


SMALLEST = LogLimits(1 << 16, 1 << 16, 1 << 16, 1 << 16)


@pytest.mark.parametrize("signals", [0, 10, 100])
def test_the_smallest_limit_does_not_send_every_few_rows_through_all_levels(tmp_path, monkeypatch, caplog, signals):
    moved = []
    thin = TableThinning._thin
    monkeypatch.setattr(TableThinning, "_thin", lambda self, *given: moved.append(given[1]) or thin(self, *given))
    named = {f"name{number}": 0.5 for number in range(signals)}
    store, rows, largest = Store(tmp_path, SMALLEST), 1500, 0
    for start in range(0, rows, 500):
        batch = Batch([replace(step_row(step), signals=named) for step in range(start, start + 500)])
        assert store.write(batch).error is None
        largest = max(largest, size_of(tmp_path, "scalars"))
    store.close()
    by_level = Counter(moved)
    assert by_level["1"] < 0.7 * by_level["0"], "most files that leave level 0 push none out of level 1"
    assert len(moved) < rows / 8
    assert load_run(tmp_path).scalars.num_rows > 50
    if signals < 100:
        assert largest <= SMALLEST.scalars_bytes
        assert not caplog.messages
    else:
        assert "`scalars_bytes=65,536` is too small for a table with 111 columns" in caplog.messages[0]
        assert len(caplog.messages) == 1
