"""Ids and labels that a CUDA device fails on are named; a healthy run is bitwise the same, and nothing waits.

One process at a time: a dozen that fail on one device at the same moment can leave the device in an error state.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
TRAIN = """
import sys
import torch
import torch.nn.functional as F
from torch import nn

AT = {at}
torch.manual_seed(0)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(50, 32)
        self.head = nn.Linear(32, 10)

    def forward(self, tokens):
        return self.head(self.wte(tokens))  # line 17

model = Net().cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
for step in range({steps}):
    tokens = torch.randint(50, (8, 16), device="cuda")
    labels = torch.randint(10, (8, 16), device="cuda")
    if step == AT:
        {fault}
    scores = model(tokens).view(-1, 10)
    flat = labels.view(-1)
    loss = F.cross_entropy(scores, flat)  # line 28
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("ended", loss.item())
"""


class Ended(NamedTuple):
    """A script that ran under `surefoot run`."""

    code: int
    out: str
    errors: str
    folder: Path

    @property
    def findings(self) -> list[dict[str, Any]]:
        """All findings, best first."""
        return json.loads((self.folder / "findings.json").read_text())["findings"]

    @property
    def facts(self) -> dict[str, Any]:
        return json.loads((self.folder / "facts.json").read_text())


def ran(folder: Path, text: str, watched: bool = True, options: Sequence[str] = ()) -> Ended:
    (folder / "train.py").write_text(text)
    command = [sys.executable, "-m", "surefoot", "run", "--out", "run", *options] if watched else [sys.executable]
    ended = subprocess.run(
        [*command, "train.py"], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=600
    )
    return Ended(ended.returncode, ended.stdout, ended.stderr, folder / "run")


FAULTS = {
    "an id": ("tokens[3, 5] = 50", "data.token-mismatch", "train.py:17", ["to 50 at ", "`tokens` in `wte.weight`"]),
    "a negative id": ("tokens[3, 5] = -1", "data.token-mismatch", "train.py:17", ["from -1 to ", "has 50 rows"]),
    "a label": ("labels[0, 0] = 10", "data.label-out-of-range", "train.py:28", ["to 10 at ", "10 outputs", "`flat`"]),
    "a label of -1": ("labels[0, 0] = -1", "data.label-out-of-range", "train.py:28", ["from -1 to ", "10 outputs"]),
    "-1 among ignored ones": (
        "labels[0] = -100; labels[0, 0] = -1", "data.label-out-of-range", "train.py:28", ["from -1 to "],
    ),
}  # fmt: skip


def has_no_noise(errors: str) -> bool:
    """Whether surefoot reports no trouble of its own, and the process was not aborted."""
    return not any(
        words in errors
        for words in ("stopped watching", "--guard has ended", "no diagnosis", "terminate called", "CUDA warning")
    )


@pytest.mark.parametrize("at", [2, 250])  # a step that is looked at closely, and one of which nothing is read at once
@pytest.mark.parametrize("fault", FAULTS)
def test_what_does_not_fit_is_named_with_its_table_step_and_line(tmp_path: Path, fault: str, at: int) -> None:
    change, cause, line, words = FAULTS[fault]
    ended = ran(tmp_path, TRAIN.format(at=at, steps=300, fault=change))
    print(ended.errors[-3000:])
    assert ended.code == 1
    assert "device-side assert triggered" in ended.errors
    assert "Traceback (most recent call last)" in ended.errors
    assert has_no_noise(ended.errors)
    found = ended.findings[0]
    assert (found["cause"], found["step"]) == (cause, at)
    assert line in found["where"]
    assert all(each in found["summary"] for each in words), found["summary"]
    assert ended.facts["problems"] == {}


def test_the_first_step_may_fail(tmp_path: Path) -> None:
    ended = ran(tmp_path, TRAIN.format(at=0, steps=3, fault="tokens += 50"))
    assert ended.code == 1
    assert has_no_noise(ended.errors), ended.errors[-3000:]
    assert (ended.findings[0]["cause"], ended.findings[0]["step"]) == ("data.token-mismatch", 0)


def test_with_guard_and_an_error_that_the_script_handles_it_is_the_same(tmp_path: Path) -> None:
    text = TRAIN.format(at=30, steps=60, fault="labels[0, 0] = 10")
    body = text[text.index("for step") :]
    handled = (
        "try:\n" + "".join(f"    {line}\n" for line in body.splitlines()) + "except RuntimeError:\n    sys.exit(3)\n"
    )
    ended = ran(tmp_path, text.replace(body, handled), options=["--guard"])
    assert ended.code == 3
    assert has_no_noise(ended.errors), ended.errors[-3000:]
    assert (ended.findings[0]["cause"], ended.findings[0]["step"]) == ("data.label-out-of-range", 30)


def test_an_index_that_is_not_seen_gives_an_honest_answer(tmp_path: Path) -> None:
    ended = ran(tmp_path, TRAIN.format(at=20, steps=60, fault="model.wte.weight[tokens + 50].sum().item()"))
    assert ended.code == 1
    assert has_no_noise(ended.errors), ended.errors[-3000:]
    found = ended.findings[0]
    assert found["cause"] == "device.assert"
    assert "all fit" in found["summary"]
    assert any("CUDA_LAUNCH_BLOCKING=1" in fix for fix in found["fixes"])


def test_what_a_compiled_model_was_given_is_named(tmp_path: Path) -> None:
    text = TRAIN.format(at=30, steps=60, fault="tokens[3, 5] = 50").replace(
        "Net().cuda()", "torch.compile(Net().cuda())"
    )
    ended = ran(tmp_path, text)
    print(ended.errors[-3000:])
    assert ended.code == 1
    assert has_no_noise(ended.errors)
    found = ended.findings[0]
    assert (found["cause"], found["step"]) == ("device.assert", 30)
    assert "`tokens` goes into the compiled model at train.py:26" in found["summary"], found["summary"]


def test_the_error_ends_a_process_with_a_stabilizer_as_it_ends_one_without(tmp_path: Path) -> None:
    """Pinned memory that is freed after the failure would abort the process, with another exit code."""
    text = """
import torch
from torch import nn
import surefoot as sf

model = nn.Linear(8, 4).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
stabilizer = sf.TrainingStabilizer(model, optimizer, recovery=sf.TrainingRecovery(every_steps=5))
for step in range(60):
    labels = torch.randint(4, (16,), device="cuda")
    if step == 50:
        labels += 4
    stabilizer.backward(nn.functional.cross_entropy(model(torch.randn(16, 8, device="cuda")), labels))
    stabilizer.step()
torch.cuda.synchronize()
"""
    ended = ran(tmp_path, text, watched=False)
    assert ended.code == 1, ended.errors[-3000:]
    assert "terminate called" not in ended.errors


def test_running_out_of_memory_names_what_grew_and_since_when(tmp_path: Path) -> None:
    text = """
import torch
from torch import nn

total = torch.cuda.get_device_properties(0).total_memory
torch.cuda.set_per_process_memory_fraction(2**30 / total)
model = nn.Linear(256, 256).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
kept = []
for step in range(1000):
    loss = model(torch.randn(4096, 256, device="cuda")).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step >= 20:
        kept.append(torch.zeros(2**20, device="cuda"))
"""
    ended = ran(tmp_path, text)
    assert ended.code == 1
    assert has_no_noise(ended.errors), ended.errors[-3000:]
    found = ended.findings[0]
    assert found["cause"] == "device.out-of-memory", found
    assert "grew from" in found["summary"], found["summary"]
    per_step = float(found["summary"].split(" MiB per step")[0].split()[-1])
    assert 3.5 < per_step < 4.5, found["summary"]


STEADY = TRAIN.replace('print("ended", loss.item())', "torch.save([*model.state_dict().values()], sys.argv[1])")


def test_a_healthy_run_is_bitwise_the_same(tmp_path: Path) -> None:
    text = STEADY.format(at=-1, steps=60, fault="pass").replace("sys.argv[1]", "'weights.pt'")
    assert ran(tmp_path, text, watched=False).code == 0
    bare = torch.load(tmp_path / "weights.pt")
    assert ran(tmp_path, text).code == 0
    watched = torch.load(tmp_path / "weights.pt")
    assert all(map(torch.equal, bare, watched))


def test_steady_steps_wait_for_nothing(tmp_path: Path) -> None:
    text = TRAIN.format(at=310, steps=420, fault='torch.cuda.set_sync_debug_mode("error")')
    text = text.replace(
        "    optimizer.step()\n",
        '    optimizer.step()\n    if step == 410: torch.cuda.set_sync_debug_mode("default")\n',
    )
    ended = ran(tmp_path, text)
    assert ended.code == 0, ended.errors[-3000:]
    assert ended.facts["problems"] == {}
