"""What a stabilizer writes into the run log."""

import math
import sys

import pytest
import torch

import surefoot as sf
from surefoot.diagnose.engine import load
from surefoot.errors import SettingError
from surefoot.record.run_folder import write_json


def train(log, steps=40, bad=(), model=None, own=None, **settings):
    """A small regression; at the steps in `bad` the loss is NaN."""
    torch.manual_seed(0)
    model = model or torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    stabilizer = sf.TrainingStabilizer(model, optimizer, log=log, **settings)
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        x = torch.randn(16, 4, generator=generator)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        if own:
            stabilizer.observe(**{own: float(step)})
        stabilizer.backward(loss * math.nan if step in bad else loss)
        stabilizer.step()
    return stabilizer


def read(log):
    log.close()
    return sf.load_run(log.folder)


def test_every_step_is_in_the_log_with_what_the_history_has(tmp_path):
    log = sf.RunLog(tmp_path)
    stabilizer = train(log, own="temperature")
    rows = read(log).scalars.to_pylist()
    assert [row["step"] for row in rows] == list(range(40))
    for row, record in zip(rows, stabilizer.history, strict=True):
        assert (row["loss"], row["grad_norm"], row["lr"]) == (
            record.signals.loss,
            record.signals.grad_norm,
            record.signals.lr,
        )
        assert row["signal.temperature"] == row["step"]


def test_a_refused_step_is_an_event_with_its_cause_and_a_row_with_its_nan(tmp_path):
    log = sf.RunLog(tmp_path)
    train(log, bad=(20,))
    run = read(log)
    (event,) = [event for event in run.events if event.event == "skip"]
    assert (event.step, event.severity, event.cause, event.action) == (20, "error", "nonfinite", "skip")
    row = run.scalars.to_pylist()[20]
    assert row["skipped"]
    assert math.isnan(row["loss"])


@pytest.mark.parametrize("lag", [{}, {"decide_on": "device", "lag_steps": 4}], ids=["host", "device"])
def test_when_a_checkpoint_is_on_disk_the_rows_up_to_it_are_too(tmp_path, lag):
    checkpoints = sf.CheckpointManager(tmp_path / "saves", every_steps=7)
    log = sf.RunLog(tmp_path / "log")
    assert log.flush(60.0)  # the thread that writes has started, and writes twice a second
    stabilizer = train(log, 0, checkpoints=checkpoints, **lag)
    announce, lost = checkpoints.events.on_saved, []

    def saved(step, folder, facts):
        rows = set(sf.load_run(log.folder).scalars["step"].to_pylist())
        lost.append((step, sorted(set(range(step)) - rows)))
        announce(step, folder, facts)

    checkpoints.events.on_saved = saved
    model, x = stabilizer._given["model"], torch.randn(16, 4)
    for _ in range(40):
        stabilizer.backward(model(x).square().mean())
        stabilizer.step()
        checkpoints.wait()
    stabilizer.save()
    assert [step for step, _ in lost] == [7, 14, 21, 28, 35, 40]
    assert [missing for _, missing in lost] == [[]] * 6


def test_layers_are_written_at_first_then_now_and_then_and_around_an_incident(tmp_path):
    log = sf.RunLog(tmp_path)
    train(log, steps=300, bad=(205,))
    layers = read(log).layers.to_pylist()
    steps = sorted({row["step"] for row in layers})
    assert steps[:100] == list(range(100))
    assert set(range(186, 225)) <= set(steps)
    assert 115 not in steps
    assert 120 in steps
    assert {row["layer"] for row in layers} == {"0.weight", "0.bias", "2.weight", "2.bias", "0", "1", "2"}
    layers = [row for row in layers if row["grad_norm"] is not None]  # the others are modules, with their outputs
    assert {row["layer"] for row in layers} == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert all(math.isnan(row["grad_norm"]) for row in layers if row["step"] == 205)


def test_the_log_changes_no_bit(tmp_path):
    models = [torch.nn.Linear(4, 1) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    log = sf.RunLog(tmp_path)
    train(log, model=models[0], bad=(7,))
    train(None, model=models[1], bad=(7,))
    log.close()
    for logged, bare in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(logged, bare)


def test_checkpoints_and_resumes_are_events(tmp_path):
    def one(steps):
        log = sf.RunLog(tmp_path)
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        manager = sf.CheckpointManager(tmp_path, every_steps=5)
        stabilizer = sf.TrainingStabilizer(model, optimizer, log=log, checkpoints=manager)
        batches = list(torch.randn(20, 8, 4, generator=torch.Generator().manual_seed(2)))
        for step, x in enumerate(stabilizer.resume(batches)):
            if step == steps:
                break
            stabilizer.backward(model(x).square().mean())
            stabilizer.step()
            manager.wait()  # one that is still being written would put the next off
        return read(log)

    first = one(12)
    assert [event.step for event in first.events if event.event == "checkpoint"] == [5, 10]
    second = one(100)
    assert [event.step for event in second.events if event.event == "resume"] == [10]
    assert second.scalars.column("step").to_pylist() == list(range(20))


def test_two_stabilizers_that_name_one_folder_share_its_log(tmp_path):
    stabilizers = [train(tmp_path / "gan", steps=5) for _ in range(2)]
    for stabilizer in stabilizers:
        stabilizer.log.close()
    run = sf.load_run(tmp_path / "gan")
    parts = run.scalars.column("part").to_pylist()
    assert sorted(set(parts)) == ["", "optimizer 2"]
    assert len(parts) == 10


def test_a_log_that_is_none_is_refused():
    with pytest.raises(SettingError, match="takes a folder or a RunLog; got 3"):
        train(3)


def test_arguments_that_are_not_utf8_are_described_as_far_as_they_can_be(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "data-\udcff"])
    log = sf.RunLog(tmp_path)
    train(log, steps=2)
    assert read(log).run["arguments"] == ["data-?"]


def test_a_log_that_was_closed_ends_and_says_what_ran(tmp_path):
    log = sf.RunLog(tmp_path)
    train(log, steps=5)
    run = read(log)
    assert (run.events[-1].event, run.events[-1].step) == ("end", 4)
    assert run.run["torch"] == torch.__version__
    assert run.run["script"]


def test_the_diagnosis_of_an_earlier_run_in_the_folder_is_not_that_of_this_one(tmp_path):
    """A trainer leaves `facts.json`; a stabilizer that writes into the same folder later has none of its own."""
    folder = tmp_path / "run"
    train(folder, steps=20).log.close()
    write_json(folder / "facts.json", load(folder)[0].to_json())
    write_json(folder / "findings.json", {"schema": 1, "verdict": "healthy", "steps": 20, "findings": []})
    train(folder, steps=40).log.close()
    assert not (folder / "findings.json").exists()
    assert load(folder)[0].steps == 40


def test_a_run_that_begins_again_in_its_folder_leaves_the_events_of_the_old_one_behind(tmp_path):
    for bad in ((3, 8), (5,)):
        log = sf.RunLog(tmp_path)
        train(log, steps=12, bad=bad)
        run = read(log)
    assert [event.step for event in run.events if event.event == "skip"] == [5]


@pytest.mark.parametrize("is_folder", [True, False])
def test_each_optimizer_is_described_with_its_own_steps_whichever_of_them_steps_first(tmp_path, is_folder):
    generator, discriminator = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
    with sf.RunLog(tmp_path / "given") as given:
        logs = (tmp_path / "folder",) * 2 if is_folder else (given.part("generator"), given.part("discriminator"))
        first = sf.TrainingStabilizer(generator, torch.optim.Adam(generator.parameters(), lr=0.001), log=logs[0])
        second = sf.TrainingStabilizer(discriminator, torch.optim.SGD(discriminator.parameters(), lr=0.5), log=logs[1])
        for _ in range(3):
            for model, stabilizer in ((discriminator, second), (generator, first)):
                stabilizer.backward(model(torch.ones(4, 2)).square().mean())
                stabilizer.step()
        read(first.log)
    facts, _ = load(tmp_path / ("folder" if is_folder else "given"))
    found = [(held.number, held.type, held.first_group.lr, held.series.lr) for held in facts.optimizers]
    assert found == [(0, "Adam", 0.001, [0.001] * 3), (1, "SGD", 0.5, [0.5] * 3)]
