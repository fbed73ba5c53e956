"""Gradual unfreezing on a two-arm spiral."""

import math
import sys

import torch
import torch.nn as nn

EPOCHS = 12
UNFREEZE_AT = 12


def spiral(n, generator):
    t = torch.rand(n, generator=generator).sqrt() * 3 * math.pi
    label = torch.randint(0, 2, (n,), generator=generator)
    angle = t + math.pi * label
    points = torch.stack([t * angle.cos(), t * angle.sin()], dim=1) / 5.0
    return points + 0.03 * torch.randn(n, 2, generator=generator), label


class SpiralNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8), nn.ReLU()
        )
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.backbone(x))

    def set_backbone(self, trainable):
        for p in self.backbone.parameters():
            p.requires_grad = trainable


def main(seed):
    torch.manual_seed(seed)
    gen = torch.Generator().manual_seed(seed + 1)
    x, y = spiral(2000, gen)
    xt, yt = spiral(500, gen)
    net = SpiralNet()
    net.set_backbone(False)
    opt = torch.optim.AdamW(net.parameters(), lr=8e-3, weight_decay=1e-4)
    for epoch in range(EPOCHS):
        if epoch == UNFREEZE_AT:
            net.set_backbone(True)
        net.train()
        for xb, yb in zip(x.split(50), y.split(50)):
            loss = nn.functional.cross_entropy(net(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
        net.eval()
        with torch.no_grad():
            acc = (net(xt).argmax(-1) == yt).float().mean()
        print(f"epoch {epoch:2d} loss {loss.item():.3f} val {acc.item():.3f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 42)
