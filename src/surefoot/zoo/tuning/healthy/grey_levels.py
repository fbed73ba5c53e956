"""Grey levels 0..255 straight into an MLP, normalised per image by a layer norm inside the model."""

import argparse

import numpy as np
import torch
import torch.nn as nn
from sklearn.datasets import load_digits


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("seed", type=int, nargs="?", default=6)
    parser.add_argument("--batch-size", type=int, default=50)
    parser.add_argument("--epochs", type=int, default=10)
    return parser.parse_args()


def main(args):
    rng = np.random.default_rng(args.seed)
    torch.manual_seed(args.seed)
    raw = load_digits()
    x = np.rint(raw.data * 255 / 16).astype(np.float32)
    order = rng.permutation(len(x))
    x, y = torch.from_numpy(x[order]), torch.from_numpy(raw.target[order])
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    for epoch in range(args.epochs):
        for rows in np.array_split(rng.permutation(1400), 1400 // args.batch_size):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            train_hits = (model(x[:1400]).argmax(1) == y[:1400]).float().mean().item()
            test_hits = (model(x[1400:]).argmax(1) == y[1400:]).float().mean().item()
        print(f"epoch {epoch}: loss {loss.item():.4f}, train {train_hits:.3f}, test {test_hits:.3f}")


if __name__ == "__main__":
    main(parse())
