"""Does the sequence contain more ups than downs? A GRU in mixed precision."""

from dataclasses import dataclass
import sys

import torch
import torch.nn as nn


@dataclass
class Hyper:
    lr: float = 0.05
    clip: float = 0.5
    steps: int = 180
    batch: int = 32
    length: int = 16


class Walker(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(1, 16)
        self.rnn = nn.GRU(16, 32, batch_first=True)
        self.head = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.float16):
            x = self.proj(x)
        with torch.autocast("cpu", enabled=False):
            states, _ = self.rnn(x.float())
        with torch.autocast("cpu", dtype=torch.float16):
            return self.head(states.mean(1)).float().squeeze(-1)


class Trainer:
    def __init__(self, hyper, seed):
        torch.manual_seed(seed)
        self.hyper, self.model = hyper, Walker()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=hyper.lr, momentum=0.9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)

    def batch(self):
        moves = torch.randn(self.hyper.batch, self.hyper.length, 1)
        return moves, (moves.sum((1, 2)) > 0).float()

    def step(self):
        moves, label = self.batch()
        logits = self.model(moves)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, label)
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), self.hyper.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.item(), ((logits > 0).float() == label).float().mean().item()

    def run(self):
        for i in range(self.hyper.steps):
            loss, acc = self.step()
            if i % 30 == 0 or i == self.hyper.steps - 1:
                print(f"{i:4d} loss={loss:.4f} acc={acc:.3f}")


if __name__ == "__main__":
    Trainer(Hyper(), int(sys.argv[1]) if len(sys.argv) > 1 else 44).run()
