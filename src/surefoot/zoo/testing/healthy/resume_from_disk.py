"""Trains, checkpoints to disk after every epoch, and continues from the file in a second Trainer."""

import argparse
import os
import random
import tempfile

import numpy as np
import torch
from sklearn.datasets import load_diabetes
from torch import nn


class Trainer:
    def __init__(self, folder, seed):
        self.path = os.path.join(folder, "last.pt")
        x, y = load_diabetes(return_X_y=True)
        order = np.random.default_rng(seed).permutation(len(x))
        x, y = x[order], y[order]
        self.x = torch.tensor(x / x[:340].std(0), dtype=torch.float32)
        self.y = torch.tensor((y - y[:340].mean()) / y[:340].std(), dtype=torch.float32)
        self.model = nn.Sequential(nn.Linear(10, 16), nn.SiLU(), nn.Linear(16, 1), nn.Flatten(0))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 6, gamma=0.5)
        self.epoch = 0

    def save(self):
        state = {
            "epoch": self.epoch,
            "python": random.getstate(),
            "torch": torch.get_rng_state(),
            **{name: getattr(self, name).state_dict() for name in ("model", "optimizer", "scheduler")},
        }
        torch.save(state, self.path + ".tmp")
        os.replace(self.path + ".tmp", self.path)

    def load(self):
        state = torch.load(self.path, weights_only=False)
        for name in ("model", "optimizer", "scheduler"):
            getattr(self, name).load_state_dict(state[name])
        random.setstate(state["python"])
        torch.set_rng_state(state["torch"])
        self.epoch = state["epoch"]

    def run(self, until):
        while self.epoch < until:
            rows = list(range(340))
            random.shuffle(rows)
            total = 0.0
            for i in range(0, 340, 20):
                batch = rows[i : i + 20]
                loss = nn.functional.mse_loss(self.model(self.x[batch]), self.y[batch])
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                total += loss.item() / 17
            self.scheduler.step()
            self.epoch += 1
            with torch.no_grad():
                test = nn.functional.mse_loss(self.model(self.x[340:]), self.y[340:]).item()
            print(f"epoch {self.epoch:2d}  train {total:.4f}  test {test:.4f}")
            self.save()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("seed", nargs="?", type=int, default=3)
    args = parser.parse_args()
    random.seed(args.seed)
    torch.manual_seed(args.seed)
    with tempfile.TemporaryDirectory() as folder:
        Trainer(folder, args.seed).run(until=10)
        again = Trainer(folder, args.seed)
        again.load()
        print(f"resumed at epoch {again.epoch}")
        again.run(until=20)
