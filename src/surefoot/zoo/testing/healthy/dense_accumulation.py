"""Gradient accumulation over batches of eight; the last window of an epoch is shorter and weighted as such."""

import sys

import torch
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train_epoch(model, loader, optimizer, window):
    model.train()
    loss_sum, seen = 0.0, 0
    batches = list(loader)
    for first in range(0, len(batches), window):
        group = batches[first : first + window]
        rows = sum(len(y) for _, y in group)
        optimizer.zero_grad()
        for x, y in group:
            loss = nn.functional.binary_cross_entropy_with_logits(model(x), y, reduction="sum") / rows
            loss.backward()
            loss_sum += loss.item() * rows
        optimizer.step()
        seen += rows
    return loss_sum / seen


def main():
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    torch.manual_seed(seed)
    x, y = load_breast_cancer(return_X_y=True)
    x_tr, x_te, y_tr, y_te = train_test_split(x, y, test_size=0.25, random_state=seed, stratify=y)
    scaler = StandardScaler().fit(x_tr)
    tensors = [torch.tensor(a, dtype=torch.float32) for a in (scaler.transform(x_tr), scaler.transform(x_te))]
    y_tr, y_te = (torch.tensor(a, dtype=torch.float32).unsqueeze(1) for a in (y_tr, y_te))
    loader = DataLoader(TensorDataset(tensors[0], y_tr), batch_size=8, shuffle=True)

    model = nn.Sequential(nn.Linear(30, 24), nn.GELU(), nn.Linear(24, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for epoch in range(16):
        loss = train_epoch(model, loader, optimizer, window=5)
        model.eval()
        with torch.no_grad():
            accuracy = ((model(tensors[1]) > 0) == (y_te > 0.5)).float().mean().item()
        if epoch % 3 == 0:
            print(f"epoch {epoch:2d}: train loss {loss:.4f}  test accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
