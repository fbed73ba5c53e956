"""What `surefoot run` writes into the run log."""

import math

import pytest
import running
from typer.testing import CliRunner

import surefoot as sf
from surefoot.cli import app
from watched import CLASSES, NET


def train(watch, *lines, steps=60, before_step=""):
    return watch(
        CLASSES,
        NET,
        *lines,
        f"""
        for step in range({steps}):
            rows = torch.randint(len(x), (32,))
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x[rows]), y[rows])
            {before_step or "pass"}
            loss.backward()
            optimizer.step()
        """,
    )


def test_every_step_is_in_the_log_as_the_facts_have_it(watch):
    ran = train(watch)
    rows = sf.load_run(ran.folder / "run").scalars.to_pylist()
    series = ran.facts["optimizers"][0]["series"]
    assert [row["step"] for row in rows] == list(range(60))
    assert [row["loss"] for row in rows] == series["loss"]
    assert [row["grad_norm"] for row in rows] == series["grad_norm"]
    assert {row["lr"] for row in rows} == {0.01}


def test_a_nan_is_a_row_and_an_event_and_the_findings_come_last(watch):
    ran = train(watch, before_step="loss = loss * float('nan') if step == 30 else loss")
    run = sf.load_run(ran.folder / "run")
    assert math.isnan(run.scalars["loss"].to_pylist()[30])
    assert [event.step for event in run.events if event.cause == "nonfinite-loss"] == [30]
    found = [event.cause for event in run.events if event.event == "finding"]
    assert found == [finding["cause"] for finding in run.findings["findings"]]
    assert found
    assert run.events[-1].event == "end"


def test_looks_give_layers_histograms_and_dead_units_by_name(watch):
    run = sf.load_run(train(watch).folder / "run")
    layers = run.layers.to_pylist()
    weights = [row for row in layers if row["layer"] == "0.weight"]
    assert len(weights) > 5
    assert all(row["grad_norm"] > 0 and row["update_ratio"] > 0 for row in weights)
    assert any(row["dead_share"] is not None for row in layers)
    kinds = {(row["kind"], row["layer"]) for row in run.histograms.to_pylist()}
    assert {("weight", "0.weight"), ("gradient", "2.bias")} <= kinds
    outputs = {row["layer"]: row for row in layers if row["activation_std"] is not None}
    assert [name.rpartition(".")[2] for name in outputs] == ["linear", "relu", "linear"], "in the order of the model"
    assert all(row["activation_largest"] > row["activation_std"] > 0 for row in outputs.values())
    assert all(row["activation_mean"] is not None for row in outputs.values())
    assert {name for kind, name in kinds if kind == "activation"} == set(outputs)


def test_a_script_that_does_not_train_leaves_no_log(watch):
    ran = watch("import torch", "print(torch.ones(1))")
    assert not (ran.folder / "run" / "telemetry").exists()


def test_two_optimizers_are_two_parts(watch):
    ran = watch(
        CLASSES,
        NET,
        """
        other = nn.Linear(8, 3)
        second = torch.optim.SGD(other.parameters(), lr=0.1)
        for step in range(20):
            for net, steps in ((model, optimizer), (other, second)):
                steps.zero_grad()
                F.cross_entropy(net(x), y).backward()
                steps.step()
        """,
    )
    scalars = sf.load_run(ran.folder / "run").scalars.to_pylist()
    assert {row["part"]: row["lr"] for row in scalars} == {"model": 0.01, "other": 0.1}
    assert len(scalars) == 40


def test_optimizers_of_one_model_are_numbered(watch):
    ran = watch(
        CLASSES,
        NET,
        """
        optimizer = torch.optim.SGD(model[0].parameters(), lr=0.01)
        second = torch.optim.SGD(model[2].parameters(), lr=0.1)
        for step in range(5):
            F.cross_entropy(model(x), y).backward()
            for one in (optimizer, second):
                one.step()
                one.zero_grad()
        """,
    )
    parts = sf.load_run(ran.folder / "run").scalars.column("part").to_pylist()
    assert sorted(set(parts)) == ["optimizer 2", "optimizer 3"]  # the first was made and never used


@pytest.mark.parametrize(("height", "told"), [(0.02, []), (2.0, [90])])
def test_a_spike_is_reported_where_it_undoes_a_tenth_of_the_way(watch, height, told):
    ran = watch(
        "import torch",
        f"""
        weight = torch.nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([weight], lr=0.0)
        for step in range(100):
            level = 2.0 if step < 30 else 0.001
            optimizer.zero_grad()
            (weight * ({height} if step == 90 else level + 1e-5 * (step % 7))).sum().backward()
            optimizer.step()
        """,
    )
    assert [event.step for event in sf.load_run(ran.folder / "run").events if event.event == "spike"] == told


def test_the_gradient_norm_is_the_one_before_the_script_clips(watch):
    plain = train(watch).folder
    clipped = watch(
        CLASSES,
        NET,
        """
        for step in range(30):
            optimizer.zero_grad()
            F.cross_entropy(100 * model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        """,
    ).folder
    rows = sf.load_run(clipped / "run").scalars.to_pylist()
    assert all(row["grad_norm"] > 1.5 and abs(row["grad_norm"] * row["clip_factor"] - 1) < 1e-3 for row in rows[:5])
    assert {row["clip_factor"] for row in sf.load_run(plain / "run").scalars.to_pylist()} == {None}


def test_a_run_into_the_folder_of_another_says_so_and_names_the_report(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "model = torch.nn.Linear(2, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "model(torch.ones(4, 2)).square().mean().backward()\n"
        "optimizer.step()\n"
    )
    first, second = (running.surefoot(tmp_path, "train.py").stderr for _ in range(2))
    assert "already contains a run" not in first
    assert "already contains a run" in second
    assert first.splitlines()[-1] == "charts and events on one page: surefoot report run"


RESUMING = """
import os, sys, torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.{optimizer}(model.parameters(), lr=0.01)
first = 0
if os.path.exists("state.pt"):
    saved = torch.load("state.pt")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    first = saved["step"]
x = torch.randn(64, 4)
for step in range(first, int(sys.argv[1])):
    optimizer.zero_grad()
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    if step + 1 in (20, 50):
        saved = {{"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}}
        torch.save(saved, "state.pt")
"""


@pytest.mark.parametrize("optimizer", ["Adam", "SGD"])
def test_a_script_that_resumes_from_its_own_checkpoint_continues_the_log(tmp_path, optimizer):
    (tmp_path / "train.py").write_text(RESUMING.format(optimizer=optimizer))
    running.surefoot(tmp_path, "train.py", "35")
    second = running.surefoot(tmp_path, "train.py", "60").stderr
    assert "continues it after step 20" in second
    running.surefoot(tmp_path, "train.py", "70")
    run = sf.load_run(tmp_path / "run")
    rows = run.scalars.to_pylist()
    assert [row["step"] for row in rows] == list(range(70))
    assert rows[69]["loss"] < rows[50]["loss"] < rows[20]["loss"] < rows[0]["loss"]
    assert [event.step for event in run.events if event.event == "checkpoint"] == [20, 50]
    assert run.events[-1].step == 70


def test_weights_alone_do_not_continue_the_log(tmp_path):
    text = RESUMING.format(optimizer="SGD").replace('    optimizer.load_state_dict(saved["optimizer"])\n', "")
    (tmp_path / "train.py").write_text(text.replace('first = saved["step"]', "pass"))
    for _ in range(2):
        ran = running.surefoot(tmp_path, "train.py", "30")
    assert "starts at step 0 and replaces it" in ran.stderr
    assert [row["step"] for row in sf.load_run(tmp_path / "run").scalars.to_pylist()] == list(range(30))


def test_the_diagnosis_of_a_killed_run_says_how_far_it_goes(tmp_path):
    (tmp_path / "facts.json").write_text('{"schema": 1, "steps": 252}')
    (tmp_path / "run.json").write_text('{"schema": 1, "script": "train.py", "exit_code": null}')
    shown = CliRunner().invoke(app, ["diagnose", str(tmp_path)])
    assert shown.exit_code == 0
    assert shown.stdout.count("killed, or still running") == 1
    assert "judged by the state that was saved at step 252" in shown.stdout


def test_a_stabilizers_folder_without_a_step_cannot_be_judged(tmp_path):
    sf.RunLog(tmp_path / "run", device_seconds=None).close()
    (tmp_path / "run" / "telemetry").mkdir(exist_ok=True)
    diagnosis = sf.diagnose(tmp_path / "run")
    assert (diagnosis.verdict, diagnosis.summary) == ("unknown", "No training step was seen.")


def test_an_optimizer_that_is_made_when_another_is_done_loses_no_row(watch):
    ran = watch(
        CLASSES,
        NET,
        """
        for made in range(2):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1 + made)
            for step in range(10):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
        """,
    )
    rows = sf.load_run(ran.folder / "run").scalars.to_pylist()
    assert [row["lr"] for row in rows].count(1.1) == 10
    assert len(rows) == 20
