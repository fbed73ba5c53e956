"""`surefoot replay --experiments` as a user types it: real scripts, real processes, known faults."""

from __future__ import annotations

import json
import runpy
import sys
from typing import TYPE_CHECKING, Any

import pytest

import forked
from captured import capture, incidents_in
from surefoot.cli import main

if TYPE_CHECKING:
    from pathlib import Path

CLASSIFY = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import surefoot as sf
torch.manual_seed(0)
x = torch.randn(512, 16)
y = (x[:, 0] > 0).long()
x[300, 5] = float("inf")
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
stabilizer = sf.TrainingStabilizer(model, optimizer, incidents="out")
loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
for epoch in range(2):
    for bx, by in loader:
        stabilizer.backward(nn.functional.cross_entropy(model(bx), by))
        stabilizer.step()
"""
REGRESS = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import surefoot as sf
torch.manual_seed(0)
x = torch.randn(2560, 8)
y = x @ torch.randn(8, 1) + 0.3 * torch.randn(2560, 1)
y[2080:2112] += 100.0
model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
kinds = {"sgd": (torch.optim.SGD, 0.03), "adam": (torch.optim.AdamW, 1e-3), "wild": (torch.optim.SGD, 0.8)}
kind = sys.argv[1] if sys.argv[1] in kinds else "wild"
make, lr = kinds[kind]
optimizer = make(model.parameters(), lr=lr)
loader = DataLoader(TensorDataset(x, y), batch_size=32)

def build():
    return model, loader, nn.functional.mse_loss, optimizer

if __name__ == "__main__":
    # Only a loss that is not finite is refused in the wild run, when its weights are long beyond repair.
    checker = sf.StabilityChecker(explosion=None, spike=None) if kind == "wild" else None
    stabilizer = sf.TrainingStabilizer(model, optimizer, incidents="out", checker=checker, escalation=None)
    for bx, by in loader:
        stabilizer.backward(nn.functional.mse_loss(model(bx), by))
        stabilizer.step()
"""
HALF = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
x = torch.randn(512, 16)
y = (x[:, 0] > 0).long()
x[128:160] *= 30000.0
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu")
for epoch in range(3):
    for bx, by in DataLoader(TensorDataset(x, y), batch_size=32):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(bx), by)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
"""


class Project:
    """A folder with a script, the incident it left, and the command."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, capture: Any, text: str, *arguments: str) -> None:
        self.folder, self.arguments, self._capture = folder, arguments, capture
        (folder / "train.py").write_text(text)
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["train.py", *arguments])
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setattr("surefoot.experiments.incident.LEAST_SECONDS", 1e6)  # however busy the machine is

    def train(self) -> Path:
        """Run the script here; its first incident."""
        runpy.run_path("train.py", run_name="__main__")
        return incidents_in(self.folder / "out")[0]

    def experiment(self, incident: Path, *words: str, way: tuple[str, ...] = ("--script", "train.py")) -> Any:
        """The result, and the exit code."""
        budget = [] if "--budget" in words else ["--budget", "100000"]
        command = ["replay", str(incident), "--experiments", "--jobs", "2", "--json", *budget, *way, *words]
        self._capture.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([*command, *self.arguments])
        told = self._capture.readouterr()
        return (json.loads(told.out) if told.out else told.err), ended.value.code


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, starts_forks: None) -> Any:
    return lambda text, *arguments: Project(tmp_path, monkeypatch, capsys, text, *arguments)


def verdicts(told: dict[str, Any]) -> dict[str, str]:
    return {row["name"]: row["verdict"] for row in told["runs"]}


def test_a_bad_row_is_named_and_other_batches_cure(project: Any) -> None:
    here = project(CLASSIFY)
    incident = here.train()
    told, code = here.experiment(incident, "--only", "lr-3,other-batches,tiny-batch", "--out", "found")
    assert (code, told["answer"], told["cures"]) == (0, "cured", ["other-batches"])
    rows = {row["name"]: row for row in told["runs"]}
    assert rows["lr-3"]["why"] == "the step fails before anything is updated"
    assert rows["tiny-batch"]["why"].startswith("row 12 alone fails")
    assert rows["repeat"]["verdict"] == "fails"
    assert told["conclusions"][:2] == [
        "From the same weights, other batches do not fail: this batch is the cause.",
        "1 of its values is not finite.",
    ]
    assert json.loads((here.folder / "found" / "bisect.json").read_text())["runs"] == told["runs"]
    # The curves begin before the step, for the picture; nothing of the script's own was touched.
    assert rows["baseline"]["loss"][0][0] == 0
    assert rows["other-batches"]["loss"][0][0] == told["runs"][0]["failed_at"] == 7
    assert len(incidents_in(here.folder / "out")) == 2


def test_an_overflow_of_a_bare_loop_is_cured_by_precision_and_outranks_what_was_inferred(project: Any) -> None:
    here = project(HALF)
    forked.run(["-m", "surefoot", "run", "--out", "out", "train.py"], check=True)
    told, code = here.experiment(incidents_in(here.folder / "out")[0], "--only", "lr-10,bf16")
    assert (code, told["cures"], told["confirms"]) == (0, ["bf16"], ["precision.fp16-overflow"])
    assert verdicts(told)["lr-10"] == "does not apply"
    assert "the precision is the cause" in told["conclusions"][0]
    assert told["findings"][0]["cause"] == "precision.fp16-overflow"


def test_a_spike_whose_update_wrecks_the_weights_is_cured_by_what_tames_it(project: Any) -> None:
    here = project(REGRESS, "sgd")
    told, code = here.experiment(here.train(), "--only", "clip,skip-batch")
    assert (code, told["cures"]) == (0, ["clip", "skip-batch"])
    assert told["runs"][0]["outcome"] == "non-finite"
    assert told["runs"][0]["failed_at"] > int(told["incident"])
    assert told["conclusions"] == ["Skipping the step avoids the failure: its update does the harm."]


def test_a_spike_that_would_have_done_no_harm_is_said_to(project: Any) -> None:
    here = project(REGRESS, "adam")
    told, code = here.experiment(here.train())
    assert (code, told["answer"], len(told["runs"])) == (0, "no harm", 1)
    assert told["sentence"].startswith("applied as it was, the loss stays at ")
    assert told["sentence"].endswith("the step did no harm.")


def test_weights_that_fail_on_any_batch_of_a_target_went_wrong_earlier(project: Any) -> None:
    here = project(REGRESS, "wild")
    told, code = here.experiment(here.train(), "--only", "lr-3,other-batches", way=("--target", "train.py:build"))
    assert (code, told["answer"], told["cures"]) == (1, "not cured", [])
    assert told["script"] == "train.py:build"
    assert verdicts(told)["lr-3"] == "does not apply"
    assert told["conclusions"][0] == "From the same weights, another batch also fails: this batch is not the cause."
    assert told["conclusions"][-1].endswith("`surefoot bisect` on the script, which starts earlier.")


def test_a_script_that_hangs_is_ended_in_time(project: Any) -> None:
    here = project(CLASSIFY)
    incident = here.train()
    (here.folder / "hangs.py").write_text("import time\ntime.sleep(1e6)\n")
    told, code = here.experiment(incident, "--budget", "2", way=("--script", "hangs.py"))
    assert code == 2
    assert "the script recorded nothing in " in told


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--experiments", "--only", "magic"], "no change 'magic'"),
        (["--experiments", "--export", "repro"], "--export and --experiments cannot be combined"),
        (["--experiments", "--script", "a.py", "--target", "b:c"], "use only one of"),
        (["--jobs", "2"], "--jobs can be used only with --experiments"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_two(tmp_path: Path, capsys: Any, words: list[str], said: str) -> None:
    capture(tmp_path, "mlp", steps=4)
    (incident,) = incidents_in(tmp_path)
    capsys.readouterr()
    way = [] if "--script" in words else ["--script", __file__]
    with pytest.raises(SystemExit) as ended:
        main(["replay", str(incident), *way, *words])
    told = capsys.readouterr().err
    assert ended.value.code == 2
    assert said in told
    assert len(told.splitlines()) == 1
