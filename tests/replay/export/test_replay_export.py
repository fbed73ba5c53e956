"""`surefoot replay --export` writes a script for a captured step, out of the script that trained or out of a target."""

import pytest

from captured import incidents_in
from replayed import run
from surefoot.record.incidents.reading import read_incident
from surefoot.replay.processes import Order, ReplayPass, run_pass
from surefoot.replay.verdict import Replayed, as_text
from surefoot.replay.worker import Answer, _run_target

TRAIN = """
import torch
from torch import nn
import surefoot as sf

def build():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.1), nn.Softplus(), nn.Linear(64, 1), nn.ReLU())

    def step(batch):
        x, y = batch
        rate = model(x).squeeze(1)
        return (rate - y * torch.log(rate)).mean()

    return {"model": model, "step": step}

if __name__ == "__main__":
    made = build()
    optimizer = torch.optim.SGD(made["model"].parameters(), lr=0.1)
    stabilizer = sf.TrainingStabilizer(made["model"], optimizer, incidents="out")
    batches = [(torch.randn(64, 4), torch.ones(64)) for _ in range(40)]
    for batch in stabilizer.resume(batches):
        stabilizer.backward(made["step"](batch))
        stabilizer.step()
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a script and the incident it left."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "train.py").write_text(TRAIN)
    run(folder, "train.py").check_returncode()
    return folder


def test_a_replay_writes_a_script_that_fails_alone(trained, tmp_path, monkeypatch, starts_forks):
    monkeypatch.chdir(trained)
    incident = incidents_in(trained / "out")[0]
    order = Order(incident, script="train.py", export=tmp_path / "repro")
    (tmp_path / "scratch").mkdir()
    about = run_pass(order, tmp_path / "scratch", 1, locate=True).reproduction
    assert about["checked"] == "reproduced: torch.log made 1 -Inf of 1 values"
    assert about["script"] == str(tmp_path / "repro" / "reproduce.py")
    text = (tmp_path / "repro" / "reproduce.py").read_text()
    assert "rate = value.squeeze(1)  # train.py:12" in text
    assert "torch.log(rate)  # train.py:13" in text
    assert about["tensor_bytes"] < about["came_from_bytes"] < sum(f.stat().st_size for f in incident.rglob("*.*"))


def test_a_target_is_exported_too(trained, tmp_path):
    incident = read_incident(incidents_in(trained / "out")[0])
    answer = Answer(tmp_path / "answer.json")
    order = {"target": f"{trained / 'train.py'}:build", "locate": True, "export": str(tmp_path / "repro")}
    _run_target(order, incident, answer)
    assert answer.found["reproduction"]["title"] == "torch.log", answer.found
    assert answer.found["reproduction"]["checked"].startswith("reproduced: ")


def test_what_could_not_be_exported_is_said_and_costs_the_exit_code(tmp_path):
    answer = Answer(tmp_path / "answer.json")
    answer.located(None, lambda make: pytest.fail("nothing to run again"), str(tmp_path / "repro"))
    assert not (tmp_path / "repro").exists()
    found = Replayed(1, "reproduced", "The same.", False, reproduction=answer.found["reproduction"])
    assert "No reproduction was written: every value of the step is finite" in as_text(found)
    assert found.exit_code == 1
    assert Replayed(1, "nondeterministic", "Not.", True, reproduction={"error": "x"}).exit_code == 4
    assert ReplayPass({}, {}, {}, {}, {}).reproduction is None


def test_a_folder_that_is_in_use_is_refused_before_anything_runs(trained, tmp_path):
    (tmp_path / "thesis.tex").touch()
    incident = incidents_in(trained / "out")[0]
    told = run(trained, "-m", "surefoot", "replay", str(incident), "--script", "train.py", "--export", str(tmp_path))
    assert told.returncode == 2
    assert "contains other files" in told.stderr
