"""An Ignite engine with a handler that guards its optimizer. One row of the data set is NaN.

    python examples/trainer_ignite.py

Needs `pip install -e ".[ignite]"`. Runs offline on a CPU.
"""

from __future__ import annotations

import tempfile

import torch
from ignite.engine import create_supervised_trainer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import surefoot as sf


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(1024, 16)
    labels = x[:, :4].argmax(1)
    x[500, 3] = float("nan")
    run = tempfile.mkdtemp()
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    handler = sf.trainers.ignite.StabilizerHandler(model, optimizer, run, clip=sf.ClipByNorm(1.0))
    trainer = create_supervised_trainer(model, optimizer, handler.watched(F.cross_entropy))
    handler.attach(trainer)
    trainer.run(DataLoader(TensorDataset(x, labels), batch_size=8, shuffle=True), max_epochs=2)
    guard = handler.training.attachments[0]
    for incident in guard.incidents:
        print(f"step {incident.step}: {incident.summary}")
    print(f"{guard.counts['applied']} of {trainer.state.iteration} steps applied; see: surefoot report {run}")


if __name__ == "__main__":
    main()
