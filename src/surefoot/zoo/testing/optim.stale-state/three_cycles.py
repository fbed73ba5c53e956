"""Three training cycles over one data set, with a clean slate for the optimizer between them."""

import sys

import torch
from torch import nn


def reset(optimizer):
    for state in optimizer.state.values():
        state["exp_avg"].zero_()
        state["exp_avg_sq"].zero_()


def train_cycle(model, optimizer, x, y, epochs, name):
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

    model = nn.Sequential(nn.Linear(8, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, betas=(0.9, 0.9999))
    for number in range(3):
        if number > 0:
            reset(optimizer)
        train_cycle(model, optimizer, x, base, 7, f"cycle {number}")


if __name__ == "__main__":
    main()
