"""The capture of incidents keeps nothing alive; `tests/record/incidents/test_capture.py` has the rest."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import surefoot as sf
from runlogs import KeptEvents
from surefoot.guard.incident_capture import (
    LONGEST_PAUSE,
    DiskPauses,
    MicrobatchFollower,
    RefusedSteps,
    StepNotes,
    keeper_for,
    while_noting,
)
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


CPU = torch.device("cpu")


def notes(errors: list[Exception] | None = None, **settings: Any) -> StepNotes:
    return StepNotes([nn.Linear(2, 1)], CPU, on_failure=([] if errors is None else errors).append, **settings)


def fail(error: Exception) -> None:
    raise error


def test_a_failing_disk_is_tried_again_after_pauses_that_double_and_is_reported_once():
    said: list[str] = []
    pauses = DiskPauses(said.append)
    tried = []
    for step in range(4 * LONGEST_PAUSE):
        if pauses.may_try(step):
            tried.append(step)
            pauses.failed(OSError("full"))
    assert tried[:6] == [0, 1, 3, 7, 15, 31]
    assert tried[-1] - tried[-2] == LONGEST_PAUSE
    assert len(said) == 1
    assert "step 0 cannot be written (OSError: full)" in said[0]
    pauses.end()
    assert pauses.may_try(tried[-1] + 1)
    pauses.written()
    assert pauses.failures == 0


def test_an_error_ends_the_notes_and_one_of_the_disk_does_not():
    errors: list[Exception] = []
    kept = notes(errors, pauses=DiskPauses(lambda message: None))
    kept.safely(fail, OSError("full"))
    assert (kept.pauses.failures, errors) == (1, [])
    assert kept.safely(int, "3") == 3
    kept.safely(fail, error := ValueError("wrong"))
    assert errors == [error]
    assert kept.capture is None
    assert kept.safely(int, "3") is None
    kept.drew(torch.ones(2))
    kept.begin(1)
    assert kept.window(0) is None


def test_methods_of_what_has_notes_end_them_by_their_errors():
    class Follower:
        def __init__(self, notes: StepNotes) -> None:
            self.notes = notes

        @while_noting
        def divide(self, by: int) -> float:
            return 1 / by

    errors: list[Exception] = []
    follower = Follower(notes(errors))
    assert follower.divide(2) == 0.5
    assert follower.divide(0) is None
    assert follower.divide(2) is None
    assert [type(error) for error in errors] == [ZeroDivisionError]


def test_each_backward_ends_a_microbatch_unless_a_closure_is_evaluated_again():
    kept = notes()
    follower = MicrobatchFollower(kept)
    for loss, again in ((1.0, False), (None, False), (2.0, False), (3.0, True)):
        follower.ran_backward(None if loss is None else torch.tensor(loss), again)
    assert kept.capture is not None
    found = [[float(loss) for loss in each.losses] for each in kept.capture.current.microbatches]
    assert found == [[1.0], [], [3.0]]
    assert kept.capture.current.microbatches[-1].evaluations == 2
    kept.restart(7)
    assert (kept.capture.current.step, kept.capture.current.microbatches) == (7, [])
    kept.close()


def test_notes_without_references_take_their_hooks_along():
    model = nn.Linear(2, 1)
    kept = StepNotes([model], CPU, on_failure=pytest.fail)
    assert model._forward_pre_hooks
    gone = weakref.ref(kept)
    del kept
    gc.collect()
    assert gone() is None
    assert not model._forward_pre_hooks
