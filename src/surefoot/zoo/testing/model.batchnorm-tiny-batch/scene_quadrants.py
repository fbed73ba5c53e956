"""Embeds whole scenes; few fit in memory, so the loader is small."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn


def norm(features, kind):
    return nn.BatchNorm1d(features) if kind == "batch" else nn.GroupNorm(4, features)


class SceneNet(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, stride=2, padding=1)
        self.fc1, self.n1 = nn.Linear(16 * 4, 48), norm(48, kind)
        self.fc2, self.n2 = nn.Linear(48, 48), norm(48, kind)
        self.out = nn.Linear(48, 4)

    def forward(self, x):
        h = F.adaptive_avg_pool2d(F.relu(self.conv(x)), 2).flatten(1)
        h = F.relu(self.n1(self.fc1(h)))
        h = F.relu(self.n2(self.fc2(h)))
        return self.out(h)


def scenes(n, generator):
    quadrant = torch.randint(0, 4, (n,), generator=generator)
    x = 0.5 * torch.randn(n, 3, 12, 12, generator=generator)
    for i, q in enumerate(quadrant.tolist()):
        r, c = 6 * (q // 2), 6 * (q % 2)
        x[i, :, r : r + 6, c : c + 6] += 0.5
    return x, quadrant


def main(args):
    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    x, y = scenes(900, generator)
    model = SceneNet(args.norm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(3):
        model.train()
        losses = []
        for rows in torch.randperm(len(x), generator=generator).split(3):
            loss = F.cross_entropy(model(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            out = model(x)
        acc = (out.argmax(1) == y).float().mean().item()
        train_loss, eval_loss = sum(losses) / len(losses), F.cross_entropy(out, y).item()
        print(f"epoch {epoch} train loss {train_loss:.3f}, same rows in eval mode {eval_loss:.3f} (acc {acc:.3f})")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("seed", type=int, nargs="?", default=52)
    parser.add_argument("--norm", default="batch", choices=["batch", "group"])
    main(parser.parse_args())
