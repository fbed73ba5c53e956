"""What is unusual about a process does not make `surefoot run` blind, and where it does, the verdict says so."""

import json
from pathlib import Path

import running

SETTING = """
import threading, time, torch
from torch import nn

class Box(torch.Tensor):
    def __repr__(self):
        return "box"

threading.Thread(target=time.sleep, args=(1e9,), daemon=True).start()
torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
x = torch.randn(64, 4)
for step in range(30):
    optimizer.param_groups[0]["lr"] = float("nan") if step == 10 else 0.05
    optimizer.zero_grad()
    (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
    optimizer.step()
    if step == 8:
        torch.save(model.state_dict(), "model.pt")  # copyreg leaves a name on the class of the tensors
print(torch.isfinite(model.weight).all().item())
"""
PATCHED = SETTING.replace(
    "torch.manual_seed", "to = torch.Tensor.to\ntorch.Tensor.to = lambda *a, **k: to(*a, **k)\ntorch.manual_seed"
)
COMPILED = """
import warnings
import torch
from torch import nn

warnings.simplefilter("error", UserWarning)
model = nn.Linear(4, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
step = torch.compile(optimizer.step, backend="eager")
x = torch.randn(64, 4)
for _ in range(6):
    optimizer.zero_grad()
    (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
    step()
print("trained")
"""


def watched(folder: Path, script: str, *words: str, python: tuple[str, ...] = ()) -> tuple[str, dict, dict]:
    """What the script printed, the facts and the diagnosis."""
    (folder / "train.py").write_text(script)
    command = [*python, "-m", "surefoot", "run", "--out", "run", *words, "train.py"]
    ended = running.python(folder, *command, fresh=bool(python))
    assert ended.returncode == 0, ended.stderr
    facts, found = (json.loads((folder / "run" / name).read_text()) for name in ("facts.json", "findings.json"))
    return ended.stdout, facts, found


def test_a_tensor_class_a_thread_and_no_debug_ranges_leave_all_steps_watched_and_guarded(tmp_path):
    printed, facts, found = watched(tmp_path, SETTING, "--guard", python=("-X", "no_debug_ranges"))
    assert (printed, facts["problems"], found["steps"]) == ("True\n", {}, 30)
    guarded = json.loads((tmp_path / "run" / "run.json").read_text())["guarded"]
    assert (guarded["skipped"], guarded["first"]) == (1, 10)
    assert guarded["reasons"] == ["lr of parameter group 0 is nan"]


def test_replaced_methods_beside_a_thread_are_named_as_the_reason_for_not_watching(tmp_path):
    _, facts, found = watched(tmp_path, PATCHED.replace('float("nan") if step == 10 else 0.05', "0.05"))
    assert "replaces methods of torch" in facts["problems"]["some steps"]
    assert found["verdict"] == "unknown"


def test_a_compiled_step_is_compiled_without_us(tmp_path):
    printed, _, found = watched(tmp_path, COMPILED)
    assert printed == "trained\n"
    assert found["verdict"] == "unknown"
    assert found["findings"] == [each for each in found["findings"] if each["severity"] == "info"]
