"""One network predicts the cultivar and two chemical readings; the losses are added with fixed weights."""

import sys

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_wine

WEIGHTS = {"cultivar": 1.0, "alcohol": 0.5, "colour": 0.5}


class MultiTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(11, 48), nn.GELU(), nn.LayerNorm(48))
        self.heads = nn.ModuleDict(
            {"cultivar": nn.Linear(48, 3), "alcohol": nn.Linear(48, 1), "colour": nn.Linear(48, 1)}
        )

    def forward(self, x):
        h = self.body(x)
        return {name: head(h) for name, head in self.heads.items()}


def losses(out, batch):
    return {
        "cultivar": F.cross_entropy(out["cultivar"], batch["cultivar"]),
        "alcohol": F.mse_loss(out["alcohol"].squeeze(1), batch["alcohol"]),
        "colour": F.mse_loss(out["colour"].squeeze(1), batch["colour"]),
    }


def main():
    torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 36)
    raw, cultivar = load_wine(return_X_y=True)
    order = torch.randperm(len(raw))
    table = torch.tensor(raw, dtype=torch.float32)[order]
    train_rows = 134
    table = (table - table[:train_rows].mean(0)) / table[:train_rows].std(0)
    data = {
        "x": torch.cat([table[:, 1:9], table[:, 10:]], dim=1),
        "cultivar": torch.tensor(cultivar)[order],
        "alcohol": table[:, 0],
        "colour": table[:, 9],
    }
    model = MultiTask()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(30):
        for rows in torch.randperm(train_rows).split(16):
            batch = {k: v[rows] for k, v in data.items()}
            parts = losses(model(batch["x"]), batch)
            loss = sum(WEIGHTS[k] * v for k, v in parts.items())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if epoch % 5 == 0 or epoch == 29:
            with torch.no_grad():
                test = {k: v[train_rows:] for k, v in data.items()}
                out = model(test["x"])
                shown = "  ".join(f"{k} {v.item():.3f}" for k, v in losses(out, test).items())
                hits = (out["cultivar"].argmax(1) == test["cultivar"]).float().mean().item()
            print(f"epoch {epoch:2d}  train {loss.item():.3f}  test: {shown}  accuracy {hits:.3f}")


if __name__ == "__main__":
    main()
