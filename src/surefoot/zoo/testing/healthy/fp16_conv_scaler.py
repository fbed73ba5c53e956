import argparse

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn


def get_data(seed):
    digits = load_digits()
    order = np.random.default_rng(seed).permutation(len(digits.target))
    x = torch.from_numpy(digits.images[order]).float().unsqueeze(1) / 16.0
    y = torch.from_numpy(digits.target[order])
    return (x[:1500], y[:1500]), (x[1500:], y[1500:])


class Trainer:
    def __init__(self, model, lr):
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        self.scaler = torch.amp.GradScaler(device="cpu", init_scale=2.0**21, growth_interval=60)
        self.loss_fn = nn.CrossEntropyLoss()
        self.skipped = 0

    def step(self, x, y):
        self.optimizer.zero_grad(set_to_none=True)
        with torch.amp.autocast("cpu", dtype=torch.float16):
            loss = self.loss_fn(self.model(x), y)
        self.scaler.scale(loss).backward()
        before = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.skipped += self.scaler.get_scale() < before
        return loss.item()

    @torch.no_grad()
    def accuracy(self, x, y):
        self.model.eval()
        with torch.amp.autocast("cpu", dtype=torch.float16):
            result = (self.model(x).argmax(1) == y).float().mean().item()
        self.model.train()
        return result


parser = argparse.ArgumentParser()
parser.add_argument("seed", nargs="?", type=int, default=1)
parser.add_argument("--epochs", type=int, default=8)
opts = parser.parse_args()
torch.manual_seed(opts.seed)
(train_x, train_y), (test_x, test_y) = get_data(opts.seed)
trainer = Trainer(
    nn.Sequential(
        nn.Conv2d(1, 12, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(12 * 16, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    ),
    lr=0.05,
)
for epoch in range(opts.epochs):
    losses = [trainer.step(train_x[i], train_y[i]) for i in torch.randperm(1500).split(50)]
    print(
        f"epoch {epoch}: loss {np.mean(losses):.4f} test {trainer.accuracy(test_x, test_y):.3f} "
        f"scale {trainer.scaler.get_scale():.0f} skipped {trainer.skipped}"
    )
