"""Tell drawn crosses from drawn squares."""

import argparse

import torch
import torch.nn as nn


def draw(n, generator):
    canvas = 0.3 * torch.randn(n, 1, 12, 12, generator=generator)
    label = torch.randint(0, 2, (n,), generator=generator)
    corner = torch.randint(0, 6, (n, 2), generator=generator)
    for k in range(n):
        r, c = corner[k].tolist()
        if label[k] == 0:
            canvas[k, 0, r + 3, c : c + 6] += 1.5
            canvas[k, 0, r : r + 6, c + 3] += 1.5
        else:
            canvas[k, 0, r : r + 6, [c, c + 5]] += 1.5
            canvas[k, 0, [r, r + 5], c : c + 6] += 1.5
    return canvas, label


def conv_block(cin, cout):
    return nn.Sequential(nn.Conv2d(cin, cout, 3, padding=1), nn.BatchNorm2d(cout), nn.ReLU(), nn.MaxPool2d(2))


def main(args):
    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    x, y = draw(1200, generator)
    xv, yv = draw(300, generator)
    model = nn.Sequential(conv_block(1, 8), conv_block(8, 16), nn.Flatten(), nn.Linear(144, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4)
    for epoch in range(args.epochs):
        model.train()
        losses = []
        for rows in torch.randperm(len(x), generator=generator).split(30):
            loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            acc = (model(xv).argmax(1) == yv).float().mean().item()
        print(f"epoch {epoch}: train loss {sum(losses) / len(losses):.4f}, val acc {acc:.3f}")


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("seed", type=int, nargs="?", default=77)
    p.add_argument("--lr", type=float, default=2e-6)
    p.add_argument("--epochs", type=int, default=6)
    main(p.parse_args())
