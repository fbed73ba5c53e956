"""Which of eight products does a visitor pick, given what is on the shelf?"""

import argparse

import torch
from torch import nn

PRODUCTS, FEATURES = 8, 6


def visits(n, taste, gen):
    visitor = torch.randn(n, FEATURES, generator=gen)
    on_shelf = (torch.rand(n, PRODUCTS, generator=gen) > 0.002).float()
    utility = visitor @ taste + 0.3 * torch.randn(n, PRODUCTS, generator=gen)
    picked = (utility - 1e3 * (1 - on_shelf)).argmax(1)
    return visitor, on_shelf, picked


class ChoiceModel(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, hidden), nn.ReLU(), nn.Linear(hidden, PRODUCTS))

    def forward(self, visitor, on_shelf):
        weight = torch.softmax(self.net(visitor), dim=1) * on_shelf
        return weight / weight.sum(1, keepdim=True)


def objective(p, picked, smoothing=0.02):
    nll = -torch.log(p[torch.arange(len(p)), picked] + 1e-8).mean()
    entropy = -(p * torch.log(p)).sum(1).mean()
    return nll - smoothing * entropy


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("seed", nargs="?", type=int, default=14)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    gen = torch.Generator().manual_seed(args.seed)
    taste = torch.randn(FEATURES, PRODUCTS, generator=gen)
    model = ChoiceModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for step in range(300):
        visitor, on_shelf, picked = visits(16, taste, gen)
        loss = objective(model(visitor, on_shelf), picked)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 30 == 0:
            print(f"step {step:3d} loss {loss.item():.4f}")
    visitor, on_shelf, picked = visits(1000, taste, gen)
    with torch.no_grad():
        hit = (model(visitor, on_shelf).argmax(1) == picked).float().mean().item()
    print(f"picks predicted {hit:.3f}")


if __name__ == "__main__":
    main()
