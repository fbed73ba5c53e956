"""Bigram-context language model that saves itself and goes on."""

import inspect
import shlex
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn


class Session:
    def __init__(self, vocab, total):
        self.model = nn.Sequential(
            nn.Embedding(vocab, 24), nn.Flatten(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, vocab)
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda s: 1.0 / (1.0 + s / 40.0))
        self.step = 0
        self.total = total

    def train(self, windows, until, generator):
        recent = []
        while self.step < until:
            rows = torch.randint(0, len(windows), (64,), generator=generator)
            loss = F.cross_entropy(self.model(windows[rows, :4]), windows[rows, 4])
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.step += 1
            recent.append(loss.item())
            if self.step % 20 == 0:
                print(f"step {self.step} nll {sum(recent[-20:]) / len(recent[-20:]):.3f}")

    def save(self, file):
        state = {"model": self.model.state_dict(), "step": self.step}
        torch.save(state, file)

    def load(self, file):
        state = torch.load(file)
        self.model.load_state_dict(state["model"])
        self.step = state["step"]


def main(seed):
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    text = inspect.getsource(shlex)
    table = {c: i for i, c in enumerate(sorted(set(text)))}
    windows = torch.tensor([table[c] for c in text]).unfold(0, 5, 1)
    session = Session(len(table), 480)
    session.train(windows, 400, generator)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "session.pt")
        session.save(file)
        session = Session(len(table), 480)
        session.load(file)
    print(f"resumed at step {session.step}")
    session.train(windows, session.total, generator)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 151)
