"""One network, three regression targets in a row, with a clean slate for the optimizer between them."""

import sys

import torch
from torch import nn


def reset(optimizer):
    for state in optimizer.state.values():
        state["exp_avg"].zero_()
        state["exp_avg_sq"].zero_()


def train_task(model, optimizer, x, y, epochs, name):
    for epoch in range(epochs):
        total = 0.0
        for rows in torch.randperm(len(x)).split(50):
            loss = nn.functional.smooth_l1_loss(model(x[rows]).squeeze(-1), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(rows)
        print(f"{name} epoch {epoch}: {total / len(x):.4f}")


def main():
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else 13
    torch.manual_seed(seed)
    x = torch.randn(1000, 8)
    base = torch.tanh(x @ torch.randn(8, 16) / 2) @ torch.randn(16) / 2
    targets = [base, base + 0.2 * x[:, 0], base + 0.2 * x[:, 1] - 0.1]

    model = nn.Sequential(nn.Linear(8, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, betas=(0.9, 0.9999))
    for number, y in enumerate(targets):
        if number > 0:
            reset(optimizer)
        train_task(model, optimizer, x, y, 7, f"task {number}")


if __name__ == "__main__":
    main()
