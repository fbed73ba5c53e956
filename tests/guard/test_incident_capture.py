"""The capture of incidents keeps nothing alive; `tests/record/incidents/test_capture.py` has the rest."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import nn

import surefoot as sf
from runlogs import KeptEvents
from surefoot.guard.incident_capture import RefusedSteps, keeper_for
from surefoot.guard.stabilizer import run_of
from surefoot.types import StepRecord


def test_the_capture_keeps_no_model_optimizer_or_schedule_alive(tmp_path):
    model = nn.Sequential(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    stabilizer = sf.TrainingStabilizer(model, optimizer, scheduler=schedule, incidents=tmp_path)
    stabilizer.backward(model(torch.ones(2, 4)).sum())
    stabilizer.step()
    capture = run_of(stabilizer).capture
    alive = [weakref.ref(each) for each in (model, optimizer, schedule)]
    del model, optimizer, schedule, stabilizer
    gc.collect()
    assert [each() for each in alive] == [None, None, None]
    assert capture is not None
    assert capture.notes is not None


def test_a_model_that_outlives_its_stabilizer_carries_no_hook(tmp_path):
    model = nn.Linear(4, 1)
    stabilizer = sf.TrainingStabilizer(model, torch.optim.SGD(model.parameters(), lr=0.1), incidents=tmp_path)
    assert len(model._forward_pre_hooks) == 1
    del stabilizer
    gc.collect()
    assert not model._forward_pre_hooks


def logged(folder, run):
    sink = KeptEvents()
    with sf.RunLog(folder, sinks=[sink], device_seconds=None) as log:
        run(log)
    return sink.events


def test_the_event_of_a_kept_step_names_its_folder_and_the_command_that_runs_it_again(tmp_path):
    def stabilized(log):
        model = nn.Linear(4, 1)
        stabilizer = sf.TrainingStabilizer(
            model, torch.optim.SGD(model.parameters(), lr=0.01), incidents=tmp_path / "run", log=log
        )
        for step in range(6):
            stabilizer.backward(model(torch.full((2, 4), torch.nan if step in (2, 3) else 1.0)).sum())
            stabilizer.step()

    def attached(log):
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        attachment = sf.attach(model, optimizer, incidents=tmp_path / "loop", log=log)
        for step in range(6):
            model(torch.full((2, 4), torch.nan if step in (2, 3) else 1.0)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        attachment.detach()

    for name, run in (("run", stabilized), ("loop", attached)):
        first, second = (event for event in logged(tmp_path / name, run) if event.event == "skip")
        place = tmp_path / name / "incidents" / "000000002"
        assert (first.step, second.step) == (2, 3)
        assert first.evidence["incident"] == str(place)
        assert place.is_dir()
        assert first.evidence["replay"].startswith(f"surefoot replay {place}")
        assert "incident" not in second.evidence  # only the first of several consecutive ones is kept


def test_an_event_is_logged_also_if_the_step_cannot_be_kept(tmp_path):
    (tmp_path / "file").write_text("")

    def run(log):
        model = nn.Linear(4, 1)
        stabilizer = sf.TrainingStabilizer(
            model, torch.optim.SGD(model.parameters(), lr=0.01), incidents=tmp_path / "file", log=log
        )
        stabilizer.backward(model(torch.full((2, 4), torch.nan)).sum())
        stabilizer.step()

    (event,) = (event for event in logged(tmp_path / "run", run) if event.event == "skip")
    assert "incident" not in event.evidence


def test_a_folder_becomes_a_keeper_and_a_keeper_stays():
    keeper = sf.IncidentKeeper("runs", most=2)
    assert keeper_for("runs") == sf.IncidentKeeper("runs")
    assert keeper_for(keeper) is keeper
    assert keeper_for(None) is None


def test_the_first_of_consecutive_refused_steps_is_wanted():
    rule = RefusedSteps(lambda record: record.skipped)

    def wants(step, refused=True, again=False):
        record = StepRecord(sf.Signals(step), skipped=refused)
        wanted = rule.wants(record, again)
        rule.add(record)
        return wanted

    assert [wants(0, refused=False), wants(1), wants(2), wants(3, again=True), wants(5)] == [0, 1, 0, 1, 1]
    rule.restart()
    assert wants(6)


def test_a_restored_run_keeps_no_copy_of_a_step_of_the_abandoned_one(tmp_path):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stabilizer = sf.TrainingStabilizer(model, optimizer, incidents=tmp_path, decide_on="device", lag_steps=4)
    saved = stabilizer.state_dict()
    for scale in (1.0, float("nan")):
        stabilizer.backward(model(torch.full((2, 4), scale)).sum())
        stabilizer.step()
    capture = run_of(stabilizer).capture
    assert capture._held is not None, "the host has not read the step yet"
    stabilizer.load_state_dict(saved)
    assert capture._held is None
