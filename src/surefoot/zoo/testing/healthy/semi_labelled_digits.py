"""Digits where most of the images were never labelled (label -1)."""

import copy
import sys

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset


def load(seed):
    rng = np.random.RandomState(seed)
    x, y = load_digits(return_X_y=True)
    order = rng.permutation(len(x))
    x, y = x[order] / 16, y[order]
    seen = y[:1400].copy()
    seen[rng.rand(1400) < 0.75] = -1
    to = lambda a, t: torch.tensor(a, dtype=t)
    return (
        TensorDataset(to(x[:1400], torch.float32), to(seen, torch.long)),
        to(x[1400:], torch.float32),
        to(y[1400:], torch.long),
    )


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 48), nn.ReLU())
        self.decoder = nn.Linear(48, 64)
        self.classifier = nn.Linear(48, 10)

    def forward(self, x):
        h = self.encoder(x)
        return self.decoder(h), self.classifier(h)


def main(seed=33):
    torch.manual_seed(seed)
    train, x_val, y_val = load(seed)
    sampler = BatchSampler(RandomSampler(train), batch_size=10, drop_last=False)
    loader = DataLoader(train, sampler=sampler, batch_size=None)
    model = TwoHeads()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    best_loss, best = float("inf"), copy.deepcopy(model.state_dict())
    for epoch in range(5):
        shown = []
        for x, y in loader:
            recon, logits = model(x)
            loss = 0.5 * F.mse_loss(recon, x)
            if (y >= 0).any():
                loss = loss + F.cross_entropy(logits, y, ignore_index=-1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            shown.append(loss.item())
        print(f"epoch {epoch} loss {np.mean(shown):.4f} first {shown[0]:.4f} last {shown[-1]:.4f}")
        if np.mean(shown) < best_loss:
            best_loss, best = np.mean(shown), copy.deepcopy(model.state_dict())
    model.load_state_dict(best)
    with torch.no_grad():
        accuracy = (model(x_val)[1].argmax(1) == y_val).float().mean().item()
    print(f"best epoch: loss {best_loss:.4f} validation accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main(*[int(s) for s in sys.argv[1:2]])
