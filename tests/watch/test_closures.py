"""An optimizer that evaluates a closure many times in a step is watched like one that does not."""

import json

from running import both

SCRIPT = """
import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(64, 5)
y = x.prod(1, keepdim=True) + x.sum(1, keepdim=True)
model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=20)
evaluations = 0


def closure():
    global evaluations
    evaluations += 1
    optimizer.zero_grad()
    loss = (model(x) - y).pow(2).mean()
    loss.backward()
    return loss


for step in range(20):
    print(step, optimizer.step(closure).item().hex(), evaluations)
"""


def test_one_evaluation_of_a_step_is_looked_at(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    plain, _ = both(tmp_path, "script.py")
    evaluations = int(plain.stdout.split()[-1])
    assert evaluations > 200
    facts = json.loads((tmp_path / "run" / "facts.json").read_text())
    assert facts["backwards"] == evaluations
    looks = facts["sampled_steps"]
    assert 5 <= len(looks) <= 12
    assert all(len(look["roots"]) == 1 for look in looks)
    assert all(len(look["passes"]) == 1 for look in looks)
    assert all(row["update"] > 0 for look in looks for step in look["steps"] for row in step["rows"])
    assert len(facts["stream"]["notes"]) == 20
    assert len(facts["optimizers"][0]["series"]["loss"]) == 20
