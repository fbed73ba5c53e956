"""`surefoot run` keeps the first bad step, and the script itself can run it again."""

import json

import pytest
from running import surefoot

from captured import incidents_in
from surefoot.diagnose.replay.passes import Order, run_pass
from surefoot.record.incidents.reading import read_incident

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
def test_the_first_bad_step_is_kept_and_can_be_run_again(tmp_path, ended):
    (tmp_path / "train.py").write_text(SCRIPT.format(line=LOSSES[ended]))
    watched = surefoot(tmp_path, "train.py")
    (folder,) = incidents_in(tmp_path / "run")
    assert f"surefoot replay {folder}" in watched.stderr
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
