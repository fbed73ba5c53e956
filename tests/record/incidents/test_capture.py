"""A refused step is kept with the state before it; healthy steps are left alone."""

import copy
import json
import logging
import math
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import surefoot as sf
from captured import RefuseAt, capture, incidents_in, state_before
from surefoot.record.incidents.reading import read_incident
from surefoot.record.incidents.values import decode


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) and one.dtype == other.dtype
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.mark.parametrize("model", ["mlp", "cnn", "lstm", "transformer"])
@pytest.mark.parametrize(("precision", "accumulate"), [("fp32", 1), ("fp16", 2)])
def test_the_state_is_the_one_before_the_step(tmp_path, model, precision, accumulate):
    if (model, precision) == ("lstm", "fp16"):
        pytest.skip("the CPU's LSTM has no fp16 form")
    before = state_before(model, precision, accumulate, step=4)
    capture(tmp_path, model, precision, accumulate, step=4)
    (folder,) = incidents_in(tmp_path)
    found = read_incident(folder)
    assert found.facts["exact"], found.facts["inexact"]
    assert same(dict(found.state["models"][0]), dict(before["model"]))
    assert same(found.state["optimizer"], before["optimizer"])
    assert same(found.state["scheduler"], before["scheduler"])
    streams = found.state["window"]["microbatches"][0]["streams"]
    assert same(streams, before["streams"])
    batch = decode(found.state["window"]["microbatches"][0]["drawn"][0])
    assert same(list(batch), list(before["batch"]))
    assert len(found.state["window"]["microbatches"]) == accumulate


def test_what_happened_is_written_for_people_and_for_programs(tmp_path):
    capture(tmp_path, "mlp", step=3)
    (folder,) = incidents_in(tmp_path)
    facts = json.loads((folder / "incident.json").read_text())
    assert (facts["schema"], facts["step"], facts["kind"], facts["severity"]) == (1, 3, "refused-here", "error")
    assert [row["step"] for row in facts["signals"]] == [0, 1, 2, 3]
    assert [row["skipped"] for row in facts["signals"]] == [False, False, False, True]
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["hardware"]["device"] == "cpu"
    assert facts["configuration"]["optimizer"] == "AdamW"
    page = (folder / "summary.md").read_text()
    assert page.startswith("# Step 3: refused-here")
    assert f"torch {torch.__version__}" in page


def test_a_loop_that_tells_nobody_its_batches_is_heard_all_the_same(tmp_path):
    x, y = torch.randn(40, 4), torch.randn(40, 1)
    x[20:24] = math.inf
    model = nn.Linear(4, 1)
    stabilizer = sf.TrainingStabilizer(model, torch.optim.SGD(model.parameters(), lr=0.01), incidents=tmp_path)
    for batch_x, batch_y in DataLoader(TensorDataset(x, y), batch_size=4):
        stabilizer.backward((model(batch_x) - batch_y).square().mean())
        stabilizer.step()
    (folder,) = incidents_in(tmp_path)
    found = read_incident(folder)
    assert found.facts["exact"]
    assert same(decode(found.state["window"]["microbatches"][0]["drawn"][0]), [x[20:24], y[20:24]])


def test_batches_of_an_evaluation_are_not_taken_for_training_data(tmp_path):
    x, y = torch.randn(8, 4), torch.randn(8, 1)
    model = nn.Sequential(nn.Linear(4, 1), nn.Dropout(0.1))
    checker = sf.StabilityChecker(nonfinite=RefuseAt(1))
    stabilizer = sf.TrainingStabilizer(
        model, torch.optim.SGD(model.parameters(), lr=0.01), incidents=tmp_path, checker=checker
    )
    loader = DataLoader(TensorDataset(x, y), batch_size=4)
    for _ in range(2):
        model.eval()
        for batch_x, _ in DataLoader(TensorDataset(torch.zeros(8, 4), y), batch_size=2):
            with torch.no_grad():
                model(batch_x)
        model.train()
        batch_x, batch_y = next(iter(loader))
        stabilizer.backward((model(batch_x) - batch_y).square().mean())
        stabilizer.step()
    (folder,) = incidents_in(tmp_path)
    drawn = read_incident(folder).state["window"]["microbatches"][0]["drawn"]
    assert [same(decode(batch), [x[:4], y[:4]]) for batch in drawn] == [True]


def test_without_any_loader_the_inputs_of_the_model_are_kept_and_that_is_said(tmp_path):
    model = nn.Linear(4, 1)
    stabilizer = sf.TrainingStabilizer(model, torch.optim.SGD(model.parameters(), lr=0.01), incidents=tmp_path)
    x = torch.full((2, 4), math.nan)
    stabilizer.backward(model(x).sum())
    stabilizer.step()
    (folder,) = incidents_in(tmp_path)
    found = read_incident(folder)
    assert not found.facts["exact"]
    assert "no batch was seen" in found.facts["inexact"][0]
    args, kwargs = decode(found.state["window"]["microbatches"][0]["calls"][0])
    assert args[0].isnan().all()
    assert kwargs == {}


def test_a_batch_that_the_loop_changes_in_place_is_no_exact_one(tmp_path):
    x = torch.randn(8, 4)
    model = nn.Linear(4, 1)
    stabilizer = sf.TrainingStabilizer(model, torch.optim.SGD(model.parameters(), lr=0.01), incidents=tmp_path)
    for (batch,) in stabilizer.resume(DataLoader(TensorDataset(x), batch_size=8)):
        batch.mul_(math.inf)
        stabilizer.backward(model(batch).sum())
        stabilizer.step()
    (folder,) = incidents_in(tmp_path)
    assert "changed in place" in read_incident(folder).facts["inexact"][0]


def test_of_steps_refused_in_a_row_the_first_is_kept(tmp_path):
    capture(tmp_path, "mlp", step=(2, 3, 4, 6), steps=8)
    assert [folder.name for folder in incidents_in(tmp_path)] == ["000000002", "000000006"]


def test_there_are_never_more_than_asked_for(tmp_path):
    keeper = sf.IncidentKeeper(tmp_path, most=2)
    capture(keeper, "mlp", step=(1, 3, 5, 7), steps=9)
    capture(keeper, "mlp", step=(0, 2), steps=4)
    assert [folder.name for folder in incidents_in(tmp_path)] == ["000000001", "000000003"]


def test_what_is_too_large_is_left_out_and_named(tmp_path):
    limit = 18_000  # 15 kB of random streams, 2 kB of weights; moments are twice that
    capture(sf.IncidentKeeper(tmp_path, most_bytes=limit), "mlp", step=2)
    (folder,) = incidents_in(tmp_path)
    found = read_incident(folder)
    assert not {"gradients", "optimizer"} & set(found.state)
    assert {"models", "window"} <= set(found.state)
    assert len([what for what in found.facts["left_out"] if "bytes" in what]) == 2
    assert "the gradients of the step" in (folder / "summary.md").read_text()
    assert sum(path.stat().st_size for path in folder.rglob("*")) < limit + 15_000


def test_a_plain_overflow_is_no_incident(tmp_path):
    model = nn.Linear(4, 1)
    scaler = sf.DynamicLossScaler(initial_scale=2.0**24)
    stabilizer = sf.TrainingStabilizer(
        model, torch.optim.SGD(model.parameters(), lr=0.01), precision="fp16", scaler=scaler, incidents=tmp_path
    )
    with stabilizer.autocast():
        loss = model(torch.full((2, 4), 100.0)).float().square().mean()
    stabilizer.backward(loss)
    assert stabilizer.step().record.overflow
    assert incidents_in(tmp_path) == []


def test_a_run_with_capture_is_bitwise_the_run_without(tmp_path):
    watched, _ = capture(tmp_path, "transformer", step=(), steps=6)
    alone, _ = capture(None, "transformer", step=(), steps=6)
    assert all(map(torch.equal, watched.state_dict().values(), alone.state_dict().values()))
    assert incidents_in(tmp_path) == []


def test_a_disk_that_cannot_be_written_to_costs_one_warning_and_no_step(tmp_path, caplog):
    (tmp_path / "incidents").write_text("in the way")
    with caplog.at_level(logging.WARNING, logger="surefoot"):
        _, stabilizer = capture(tmp_path, "mlp", step=(2, 5), steps=8)
    assert stabilizer.counts["applied"] == 6
    assert sum("cannot be written" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("decide_on", ["host", "device"])
def test_incidents_are_captured_again_once_the_disk_works(tmp_path, caplog, decide_on):
    model = nn.Linear(4, 1)
    stabilizer = sf.TrainingStabilizer(
        model, torch.optim.AdamW(model.parameters(), fused=True), incidents=tmp_path, decide_on=decide_on, lag_steps=1
    )
    (tmp_path / "incidents").write_text("in the way")
    for step in range(12):
        if step == 7:
            (tmp_path / "incidents").unlink()
        stabilizer.backward(model(torch.randn(8, 4)).mean() * (math.nan if step in (2, 4, 9) else 1.0))
        stabilizer.step()
    assert [folder.name for folder in incidents_in(tmp_path)] == ["000000009"]
    assert sum("cannot be written" in record.message for record in caplog.records) == 1


def test_a_disk_that_fails_repeatedly_is_asked_less_and_less_often(tmp_path, caplog):
    """Every step is refused: the disk is asked at steps 0, 1, 3, 7, 15; it works from step 10 on."""
    model = nn.Linear(4, 1)
    stabilizer = sf.TrainingStabilizer(
        model, torch.optim.SGD(model.parameters(), lr=0.1), incidents=tmp_path, escalation=None
    )
    (tmp_path / "incidents").write_text("in the way")
    for step in range(20):
        if step == 10:
            (tmp_path / "incidents").unlink()
        stabilizer.backward(model(torch.randn(8, 4)).mean() * math.nan)
        stabilizer.step()
    assert [folder.name for folder in incidents_in(tmp_path)] == ["000000015"]
    assert sum("cannot be written" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_what_the_host_knows_at_once_is_exact_though_it_is_written_later(tmp_path, model):
    before = state_before(model, "fp32", 1, step=2)
    capture(tmp_path, model, step=2, decide_on="device", lag_steps=3)
    (folder,) = incidents_in(tmp_path)
    found = read_incident(folder)
    assert found.facts["exact"], found.facts["inexact"]
    assert same(dict(found.state["models"][0]), dict(before["model"]))
    assert same(found.state["optimizer"], before["optimizer"])


def test_a_verdict_that_comes_later_says_how_much_later(tmp_path):
    capture(tmp_path, "mlp", step=2, steps=9, decide_on="device", lag_steps=3, fused=True)
    (folder,) = incidents_in(tmp_path)
    facts = read_incident(folder).facts
    assert facts["step"] == 2
    assert not facts["exact"]
    assert facts["applied_since"] == 3
    assert any("3 more steps were applied" in reason for reason in facts["inexact"])


def test_a_keeper_refuses_settings_that_cannot_work(tmp_path):
    with pytest.raises(sf.SettingError, match="most"):
        sf.IncidentKeeper(tmp_path, most=0)
    with pytest.raises(sf.SettingError, match="part"):
        sf.IncidentKeeper(tmp_path, part="../up")
    model = nn.Linear(1, 1)
    with pytest.raises(sf.SettingError, match="incidents"):
        sf.TrainingStabilizer(model, torch.optim.SGD(model.parameters()), incidents=3)


def test_a_model_can_be_copied_and_pickled_while_it_is_watched(tmp_path):
    model = nn.Linear(4, 1)
    stabilizer = sf.TrainingStabilizer(model, torch.optim.SGD(model.parameters(), lr=0.01), incidents=tmp_path)
    for (batch,) in stabilizer.resume(DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=4)):
        pickled = pickle.dumps(copy.deepcopy(model))
        assert b"surefoot.record" not in pickled  # it can be loaded where there is no surefoot
        twin = pickle.loads(pickled)
        stabilizer.backward(model(twin(batch) * batch).sum())
        stabilizer.step()
        assert not model._forward_pre_hooks
    notes = stabilizer._run.capture.notes
    assert [len(each.calls) for each in notes.window(1).microbatches] == [1]  # the twin's call is not the model's


def test_no_batch_outlives_the_next_one(tmp_path):
    model = nn.Linear(4, 1)
    stabilizer = sf.TrainingStabilizer(model, torch.optim.SGD(model.parameters(), lr=0.01), incidents=tmp_path)
    seen = []
    for batch in stabilizer.resume(torch.randn(4) for _ in range(6)):
        assert [held() for held in seen] == [None] * len(seen)
        stabilizer.backward(model(batch).sum())
        stabilizer.step()
        seen = [weakref.ref(batch)]
        del batch


def test_what_a_killed_run_left_half_written_is_cleared_away(tmp_path):
    left = tmp_path / "incidents" / ".000000007.4194304-1-0123abcd.part"
    left.mkdir(parents=True)
    (left / "tensors.safetensors").write_bytes(b"half of it")
    capture(tmp_path, "mlp", step=2)
    assert [path.name for path in (tmp_path / "incidents").iterdir()] == ["000000002"]
