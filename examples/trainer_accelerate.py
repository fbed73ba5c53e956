"""A loop with Accelerate, guarded by one line. One row of the data set is NaN.

    python examples/trainer_accelerate.py

Needs `pip install -e ".[accelerate]"`. Runs offline on a CPU.
"""

from __future__ import annotations

import tempfile

import torch
from accelerate import Accelerator
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
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(TensorDataset(x, labels), batch_size=8, shuffle=True)
    model, optimizer, loader = sf.trainers.accelerate.prepare(accelerator, model, optimizer, loader, log=run)
    guard = sf.trainers.accelerate.training_of(accelerator).attachments[0]
    for _ in range(3):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(inputs), targets))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    accelerator.end_training()
    for incident in guard.incidents:
        print(f"step {incident.step}: {incident.summary}")
    print(f"{guard.counts['applied']} of {guard.counts['steps']} steps applied; see: surefoot report {run}")


if __name__ == "__main__":
    main()
