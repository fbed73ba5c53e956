"""One defective part in twenty-five; no resampling, the features are good enough."""

import argparse

import numpy as np
import torch
from sklearn.metrics import f1_score
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Parts(Dataset):
    """Short vibration traces; a defect adds a ringing at a higher frequency."""

    def __init__(self, n, rng):
        t = np.linspace(0, 1, 64)
        self.label = (rng.random(n) < 0.04).astype(np.int64)
        phase = rng.uniform(0, 2 * np.pi, (n, 2, 1))
        base = np.sin(2 * np.pi * 3 * t + phase[:, 0])
        ring = 0.9 * np.sin(2 * np.pi * 14 * t + phase[:, 1])
        trace = base + self.label[:, None] * ring + 0.25 * rng.standard_normal((n, 64))
        self.trace = torch.tensor(trace, dtype=torch.float32).unsqueeze(1)

    def __len__(self):
        return len(self.label)

    def __getitem__(self, i):
        return self.trace[i], self.label[i]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("seed", nargs="?", type=int, default=12)
    args = parser.parse_args()
    rng = np.random.default_rng(args.seed)
    torch.manual_seed(args.seed)
    train, test = Parts(3000, rng), Parts(1500, rng)
    model = nn.Sequential(
        nn.Conv1d(1, 16, 9, padding=4),
        nn.GELU(),
        nn.MaxPool1d(4),
        nn.Conv1d(16, 24, 5),
        nn.GELU(),
        nn.AdaptiveMaxPool1d(1),
        nn.Flatten(),
        nn.Linear(24, 2),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for epoch in range(5):
        model.train()
        losses = []
        for x, y in DataLoader(train, batch_size=64, shuffle=True, drop_last=True):
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            guess = model(test.trace).argmax(1).numpy()
        print(f"epoch {epoch}  loss {np.mean(losses):.4f}  F1 of the defects {f1_score(test.label, guess):.3f}")


if __name__ == "__main__":
    main()
