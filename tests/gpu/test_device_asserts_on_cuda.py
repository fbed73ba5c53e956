"""Ids and labels that a CUDA device fails on are named; a healthy run is bitwise the same, and nothing waits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from together import Ended, run_all, watched

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

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


def ran(folder: Path, text: str, is_watched: bool = True) -> Ended:
    (folder / "train.py").write_text(text)
    return run_all({"": (folder, watched() if is_watched else ["train.py"])}, fresh=True)[""]


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


LATE = 250
"""A step of which nothing is read at once; step 2 is looked at closely."""


def handled(text: str) -> str:
    """The script with its loop in a `try` statement."""
    body = text[text.index("for step") :]
    indented = "".join(f"    {line}\n" for line in body.splitlines())
    return text.replace(body, f"try:\n{indented}except RuntimeError:\n    sys.exit(3)\n")


SCRIPTS = {
    **{(fault, at): TRAIN.format(at=at, steps=300, fault=FAULTS[fault][0]) for fault in FAULTS for at in (2, LATE)},
    "the first step": TRAIN.format(at=0, steps=3, fault="tokens += 50"),
    "handled": handled(TRAIN.format(at=30, steps=60, fault="labels[0, 0] = 10")),
    "an index": TRAIN.format(at=20, steps=60, fault="model.wte.weight[tokens + 50].sum().item()"),
    "compiled": TRAIN.format(at=30, steps=60, fault="tokens[3, 5] = 50").replace(
        "Net().cuda()", "torch.compile(Net().cuda())"
    ),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Ended]:
    """Every script of `SCRIPTS` under `surefoot run`. The end of the interpreter is part of what is tested."""
    programs = {}
    for name, text in SCRIPTS.items():
        folder = tmp_path_factory.mktemp("run")
        (folder / "train.py").write_text(text)
        programs[name] = (folder, watched(options=["--guard"] if name == "handled" else []))
    return run_all(programs, fresh=True)


@pytest.mark.parametrize("at", [2, LATE])
@pytest.mark.parametrize("fault", FAULTS)
def test_what_does_not_fit_is_named_with_its_table_step_and_line(runs: dict[Any, Ended], fault: str, at: int) -> None:
    _, cause, line, words = FAULTS[fault]
    ended = runs[fault, at]
    print(ended.errors[-3000:])
    assert ended.code == 1
    assert "device-side assert triggered" in ended.errors
    assert "Traceback (most recent call last)" in ended.errors
    assert has_no_noise(ended.errors)
    found = ended.written("findings.json")["findings"][0]
    assert (found["cause"], found["step"]) == (cause, at)
    assert line in found["where"]
    assert all(each in found["summary"] for each in words), found["summary"]
    assert ended.written("facts.json")["problems"] == {}


def test_the_first_step_may_fail(runs: dict[Any, Ended]) -> None:
    ended = runs["the first step"]
    assert ended.code == 1
    assert has_no_noise(ended.errors), ended.errors[-3000:]
    assert (
        ended.written("findings.json")["findings"][0]["cause"],
        ended.written("findings.json")["findings"][0]["step"],
    ) == ("data.token-mismatch", 0)


def test_with_guard_and_an_error_that_the_script_handles_it_is_the_same(runs: dict[Any, Ended]) -> None:
    ended = runs["handled"]
    assert ended.code == 3
    assert has_no_noise(ended.errors), ended.errors[-3000:]
    assert (
        ended.written("findings.json")["findings"][0]["cause"],
        ended.written("findings.json")["findings"][0]["step"],
    ) == ("data.label-out-of-range", 30)


def test_an_index_that_is_not_seen_gives_an_honest_answer(runs: dict[Any, Ended]) -> None:
    ended = runs["an index"]
    assert ended.code == 1
    assert has_no_noise(ended.errors), ended.errors[-3000:]
    found = ended.written("findings.json")["findings"][0]
    assert found["cause"] == "device.assert"
    assert "all fit" in found["summary"]
    assert any("CUDA_LAUNCH_BLOCKING=1" in fix for fix in found["fixes"])


def test_what_a_compiled_model_was_given_is_named(runs: dict[Any, Ended]) -> None:
    ended = runs["compiled"]
    print(ended.errors[-3000:])
    assert ended.code == 1
    assert has_no_noise(ended.errors)
    found = ended.written("findings.json")["findings"][0]
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
    ended = ran(tmp_path, text, is_watched=False)
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
    found = ended.written("findings.json")["findings"][0]
    assert found["cause"] == "device.out-of-memory", found
    assert "grew from" in found["summary"], found["summary"]
    per_step = float(found["summary"].split(" MiB per step")[0].split()[-1])
    assert 3.5 < per_step < 4.5, found["summary"]


STEADY = TRAIN.replace('print("ended", loss.item())', "torch.save([*model.state_dict().values()], sys.argv[1])")


def test_a_healthy_run_is_bitwise_the_same(tmp_path: Path) -> None:
    text = STEADY.format(at=-1, steps=60, fault="pass").replace("sys.argv[1]", "'weights.pt'")
    assert ran(tmp_path, text, is_watched=False).code == 0
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
    assert ended.written("facts.json")["problems"] == {}
