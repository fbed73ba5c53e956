"""A Lightning `Trainer`, guarded by one line. One row of the data set is NaN.

    python examples/trainer_lightning.py

Needs `pip install -e ".[lightning]"`. Runs offline on a CPU.
"""

from __future__ import annotations

import tempfile

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import surefoot as sf


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))

    def training_step(self, batch, index):
        x, labels = batch
        return F.cross_entropy(self.layers(x), labels)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(1024, 16)
    labels = x[:, :4].argmax(1)
    x[500, 3] = float("nan")
    folder, run = tempfile.mkdtemp(), tempfile.mkdtemp()
    callback = sf.trainers.lightning.StabilizerCallback(run)
    trainer = L.Trainer(
        default_root_dir=folder, accelerator="cpu", max_epochs=3, accumulate_grad_batches=4, gradient_clip_val=1.0,
        callbacks=[callback], logger=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Classifier(), DataLoader(TensorDataset(x, labels), batch_size=8, shuffle=True))
    guard = callback.training.attachments[0]
    for incident in guard.incidents:
        print(f"step {incident.step}: {incident.summary}")
    print(f"{guard.counts['applied']} of {trainer.global_step} steps applied; see: surefoot report {run}")


if __name__ == "__main__":
    main()
