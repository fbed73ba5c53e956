"""Targets and scripts for the tests of `surefoot replay`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

import forked
from captured import MODELS

if TYPE_CHECKING:
    import subprocess


def _built(name: str) -> tuple[Any, Any, Any, Any]:
    net = MODELS[name]()
    return net, [], F.cross_entropy, torch.optim.AdamW(net.parameters(), lr=3e-3)


def mlp() -> Any:
    return _built("mlp")


def cnn() -> Any:
    return _built("cnn")


def lstm() -> Any:
    return _built("lstm")


def transformer() -> Any:
    return _built("transformer")


def step_of_mlp() -> Any:
    """The step itself instead of its parts."""
    net = MODELS["mlp"]()

    def step(batch: Any) -> Any:
        x, y = batch
        return F.cross_entropy(net(x), y)

    return step


def target(name: str) -> str:
    return f"{Path(__file__)}:{name}"


SCRIPT = """
import atexit, random, sys
import numpy as np, torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
sys.path.insert(0, {tests!r})
from captured import MODELS, RefuseAt
import surefoot as sf

model, precision, accumulate, folder = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
torch.manual_seed(int(sys.argv[5]) if len(sys.argv) > 5 else 0)
x, y = torch.randn(80, 16), torch.randint(0, 5, (80,))
net = MODELS[model]()
optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
stabilizer = sf.TrainingStabilizer(
    net, optimizer, precision=precision, accumulate=accumulate, incidents=folder,
    checker=sf.StabilityChecker(nonfinite=RefuseAt(3), explosion=None, spike=None),
    scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50),
)
atexit.register(lambda: open("at_exit", "w").close())
try:
    for epoch in range(2):
        for bx, by in DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True):
            bx = bx + 0.1 * torch.randn_like(bx) + float(np.random.rand()) + random.random()
            with stabilizer.autocast():
                loss = F.cross_entropy(net(bx), by)
            stabilizer.backward(loss)
            try:
                stabilizer.step()
            except Exception:
                pass
        torch.save(net.state_dict(), "model.pt")
finally:
    torch.save(net.state_dict(), "last.pt")
"""


def write_script(folder: Path) -> Path:
    path = folder / "train.py"
    path.write_text(SCRIPT.format(tests=str(Path(__file__).parent)))
    return path


def run(folder: Path, *words: str, starts_forks: bool = True) -> subprocess.CompletedProcess[str]:
    """`python WORDS`; what a command starts by itself is forked, too, or a fresh process."""
    return forked.run(words, cwd=folder, starts_forks=starts_forks)
