"""`surefoot run` keeps the first bad step, and the script itself can run it again."""

import json
import math

import pytest
import torch
from running import surefoot
from torch import nn

from captured import incidents_in
from surefoot.record.incidents.reading import read_incident
from surefoot.record.reading import load_run
from surefoot.replay.processes import Order, run_pass
from surefoot.watch.context import WatchOptions
from surefoot.watch.watcher import Watcher

SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x, y = torch.randn(64, 8), torch.rand(64) + 0.5
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
def loss_of(a, b):
    rate = model(a + 0.1 * torch.randn_like(a)).squeeze(1)
    {line}
for epoch in range(3):
    for i, (a, b) in enumerate(DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)):
        optimizer.zero_grad()
        for part in (0, 1):
            (loss_of(a[part::2], b[part::2]) / 2).backward()
        optimizer.step()
        if epoch == 1 and i == 3:
            with torch.no_grad():
                model[4].bias.fill_(-100.0)
print(float(model[0].weight.sum()))
torch.save(model, "model.pt")
"""
LOSSES = {
    "backward": "return (rate - b * torch.log(torch.relu(rate + 3))).mean()",
    "step": "return (rate - b * torch.sqrt((rate + 4).abs() * (rate > -3))).mean()",
}


@pytest.mark.parametrize("ended", list(LOSSES))
def test_the_first_bad_step_is_kept_and_can_be_run_again(tmp_path, ended, starts_forks):
    (tmp_path / "train.py").write_text(SCRIPT.format(line=LOSSES[ended]))
    watched = surefoot(tmp_path, "train.py")
    (folder,) = incidents_in(tmp_path / "run")
    assert f"surefoot replay {folder.relative_to(tmp_path)}" in watched.stderr
    (kept,) = (event for event in load_run(tmp_path / "run").events if event.cause == "incident")
    assert (kept.step, kept.evidence["incident"]) == (12, str(folder))
    assert kept.evidence["replay"].startswith(f"surefoot replay {folder}")
    facts = read_incident(folder).facts
    assert (facts["step"], facts["exact"], facts["configuration"]["ended"]) == (12, True, ended)
    assert facts["script"]["path"] == "train.py"
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    (tmp_path / "model.pt").unlink()
    found = run_pass(Order(folder, script=str(tmp_path / "train.py")), scratch, 1, locate=True)
    for kind in ("losses", "gradients"):
        assert found.prints[kind] == facts["fingerprints"][kind], kind
    operation = {"backward": "aten.log.default", "step": "aten.sqrt.default"}[ended]
    assert operation in (found.origin["op"], found.origin["forward_op"])
    assert not (tmp_path / "model.pt").exists()


def test_a_healthy_run_has_no_incident(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT.format(line="return (rate - b).square().mean()"))
    surefoot(tmp_path, "train.py").check_returncode()
    assert incidents_in(tmp_path / "run") == []
    assert json.loads((tmp_path / "run" / "findings.json").read_text())["verdict"]


def test_a_norm_that_overflows_is_not_taken_for_a_bad_gradient(tmp_path):
    (tmp_path / "train.py").write_text(
        """
import torch
torch.manual_seed(0)
x = torch.randn(512, 10) * torch.tensor([1, 2, 5, 1, 1, 3, 1, 1, 1, 10.0])
y = x.sum(1, keepdim=True)
model = torch.nn.Sequential(torch.nn.Linear(10, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(40):
    rows = torch.randperm(512)[:32]
    loss = ((model(x[rows]) - y[rows]) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
    )
    surefoot(tmp_path, "train.py").check_returncode()
    (folder,) = incidents_in(tmp_path / "run")
    facts = read_incident(folder).facts
    assert facts["signals"][-1]["grad_norm"] > 1e20, "its squares are beyond float32"
    assert facts["summary"] == "the loss is inf"
    assert [each["cause"] for each in json.loads((tmp_path / "run" / "findings.json").read_text())["findings"]] == [
        "lr.too-high"
    ]


TWO = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(32, 4)
x[21, 1] = float("inf")
first, second = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1)), nn.Linear(4, 4)
optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in (first, second)]
for (a,) in DataLoader(TensorDataset(x), batch_size=8):
    optimizers[1].zero_grad()
    second(a).square().mean().backward()
    optimizers[1].step()
    optimizers[0].zero_grad()
    first(a.clamp(-9, 9)).square().mean().backward()
    optimizers[0].step()
"""


def test_of_two_optimizers_the_one_with_the_bad_gradients_is_kept(tmp_path):
    (tmp_path / "train.py").write_text(TWO)
    surefoot(tmp_path, "train.py")
    (folder,) = incidents_in(tmp_path / "run")
    facts = read_incident(folder).facts
    assert facts["configuration"]["models"] == ["Linear"]
    assert all(each["nonfinite"] for each in facts["fingerprints"]["gradients"].values())


RIVALS = """
import torch
from torch import nn

torch.manual_seed(0)
G, D = nn.Sequential(nn.Linear(3, 2)), nn.Sequential(nn.Linear(2, 1), nn.Dropout(0.2), nn.Sigmoid())
of_g, of_d = torch.optim.Adam(G.parameters(), lr=1e-3), torch.optim.Adam(D.parameters(), lr=1e-2)
for step in range(6):
    if step == 4:
        with torch.no_grad():
            D[0].bias.fill_(-200.0)
    of_d.zero_grad()
    fake = G(torch.randn(8, 3)).detach()
    (-torch.log(D(torch.randn(8, 2))) - torch.log(1 - D(fake))).mean().backward()
    of_d.step()
    of_g.zero_grad()
    (1 - D(G(torch.randn(8, 3)))).mean().backward()
    of_g.step()
"""


def test_of_rivals_the_one_that_failed_is_kept_with_all_that_it_takes_to_run_the_step_again(tmp_path, starts_forks):
    (tmp_path / "train.py").write_text(RIVALS)
    surefoot(tmp_path, "train.py")
    (folder,) = incidents_in(tmp_path / "run")
    facts = read_incident(folder).facts
    assert facts["configuration"]["models"] == ["0: G (Sequential)", "1: D (Sequential)"]
    assert facts["configuration"]["lr"] == 1e-2
    assert list(facts["fingerprints"]["gradients"]) == ["1.0.weight", "1.0.bias"]
    assert [row["lr"] for row in facts["signals"]] == [1e-2] * 4, "the other's losses are none of its"
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    found = run_pass(Order(folder, script=str(tmp_path / "train.py")), scratch, 1, locate=False)
    for kind in ("losses", "inputs", "gradients"):
        assert found.prints[kind] == facts["fingerprints"][kind], kind
    assert found.notes == []


class Scaled(nn.Linear):
    def forward(self, x, *, by=1.0):
        return super().forward(x) * by


def watched(tmp_path, run):
    """The incident that is left when `run` has come to a bad loss."""
    watcher = Watcher(WatchOptions(folder=lambda: tmp_path))
    loss = run(watcher)
    watcher.backward.before(loss)
    loss.backward()
    watcher.backward.after()
    watcher.sampler.end()
    assert not watcher.probes.problems
    (folder,) = incidents_in(tmp_path)
    return read_incident(folder)


def test_what_a_model_was_called_with_is_known_from_the_very_first_step(tmp_path):
    model, x, by = Scaled(3, 1), torch.ones(2, 3), torch.tensor(math.inf)

    def run(watcher):
        run.optimizer = torch.optim.SGD(model.parameters())  # the watcher does not hold it
        watcher.steps.optimizer_made(run.optimizer)
        return model(x, by=by).sum()

    found = watched(tmp_path, run)
    ((inputs,),) = found.facts["fingerprints"]["inputs"]
    assert [each["shape"] for each in inputs] == [[2, 3], []], "keyword arguments are among them"
    assert found.facts["configuration"]["turn"] == {"optimizer": 0, "after": None, "trained_by": [[0]]}
    assert not model._forward_pre_hooks


def test_a_forward_from_before_another_optimizers_step_is_said_to_be_out_of_reach(tmp_path):
    maker, critic = nn.Linear(3, 2), nn.Linear(2, 1)

    def run(watcher):
        run.optimizers = [torch.optim.SGD(each.parameters()) for each in (critic, maker)]
        for optimizer in run.optimizers:
            watcher.steps.optimizer_made(optimizer)
        made = maker(torch.ones(1, 3))
        critic(made.detach()).sum().backward()
        watcher.steps.before(run.optimizers[0], False)
        run.optimizers[0].step()
        watcher.steps.after(run.optimizers[0])
        return critic(made).sum() * math.inf

    facts = watched(tmp_path, run).facts
    assert facts["configuration"]["turn"]["optimizer"] == 1, "the loss reaches both, and it is the other's turn"
    assert facts["configuration"]["turn"]["after"] == 0
    assert any("the forward pass of maker (Linear) ran before another" in each for each in facts["inexact"])


def test_a_disk_that_fails_costs_one_incident_and_a_later_one_is_kept(watch):
    run = watch.guarded(
        """
        import math
        from pathlib import Path
        import torch

        Path("run").mkdir(exist_ok=True)
        blocked = Path("run/incidents")
        blocked.write_text("no folder can be made here")
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(12):
            if step == 6:
                blocked.unlink()
            optimizer.zero_grad()
            model(torch.full((2, 4), math.nan if step in (3, 9) else 1.0)).square().mean().backward()
            optimizer.step()
        """
    )
    assert run.facts["problems"] == {}
    assert run.errors.count("the incident of step 3 cannot be written") == 1
    assert [path.name for path in (run.folder / "run" / "incidents").iterdir()] == ["000000009"]
