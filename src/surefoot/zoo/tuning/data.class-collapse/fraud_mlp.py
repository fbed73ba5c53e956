"""Flag fraudulent card payments."""

import argparse

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def payments(n, rng):
    fraud = (rng.random(n) < 0.03).astype(np.float32)
    shift = np.linspace(-0.9, 0.9, 10)
    x = rng.standard_normal((n, 10)) + fraud[:, None] * shift
    return torch.tensor(x, dtype=torch.float32), torch.tensor(fraud)


def report(model, x, y):
    model.eval()
    with torch.no_grad():
        flagged = model(x).squeeze(1) > 0
    model.train()
    accuracy = (flagged == y.bool()).float().mean().item()
    recall = flagged[y == 1].float().mean().item()
    return f"accuracy {accuracy:.3f} recall {recall:.3f} flagged {int(flagged.sum())} of {len(y)}"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("seed", nargs="?", type=int, default=99)
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    x, y = payments(4000, rng)
    x_test, y_test = payments(2000, rng)

    model = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 1))
    loss_fn = nn.BCEWithLogitsLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)
    for epoch in range(args.epochs):
        total = 0.0
        for xb, yb in loader:
            loss = loss_fn(model(xb).squeeze(1), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch}: loss {total / len(loader):.4f} {report(model, x_test, y_test)}")


if __name__ == "__main__":
    main()
