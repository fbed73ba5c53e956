"""`transformers.Trainer`, guarded by one line. One row of the data set is NaN.

    python examples/trainer_transformers.py

Needs `pip install -e ".[transformers]"`. Runs offline on a CPU.
"""

from __future__ import annotations

import tempfile

import torch
from torch import nn
from torch.nn import functional as F
from transformers import Trainer, TrainingArguments

import surefoot as sf


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))

    def forward(self, x, labels):
        logits = self.layers(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(1024, 16)
    labels = x[:, :4].argmax(1)
    x[500, 3] = float("nan")
    data = [{"x": row, "labels": label} for row, label in zip(x, labels, strict=True)]
    folder, run = tempfile.mkdtemp(), tempfile.mkdtemp()
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=8, gradient_accumulation_steps=4, num_train_epochs=3, learning_rate=3e-3,
        logging_steps=24, save_steps=48, report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    callback = sf.trainers.transformers.StabilizerCallback(run)
    trainer = Trainer(Classifier(), arguments, train_dataset=data, callbacks=[callback])
    trainer.train()
    guard = callback.training.attachments[0]
    for incident in guard.incidents:
        print(f"step {incident.step}: {incident.summary}")
    print(f"{guard.counts['applied']} of {trainer.state.global_step} steps applied; see: surefoot report {run}")


if __name__ == "__main__":
    main()
