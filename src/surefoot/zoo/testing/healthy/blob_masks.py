"""Per-pixel labels for pictures of two kinds of blobs."""

import sys
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

VOID = 255


@dataclass
class Config:
    seed: int = 17
    size: int = 20
    steps: int = 150
    batch: int = 8
    lr: float = 3e-3
    classes: int = 3


def scene(size, gen):
    image = 0.3 * torch.randn(2, size, size, generator=gen)
    label = torch.zeros(size, size, dtype=torch.long)
    grid = torch.arange(size).float()
    yy, xx = torch.meshgrid(grid, grid, indexing="ij")
    for kind in (1, 2):
        cy, cx = (torch.rand(2, generator=gen) * (size - 8) + 4).tolist()
        dist = ((yy - cy) ** 2 + (xx - cx) ** 2).sqrt()
        image[kind - 1] += (dist < 3.5).float()
        label[dist < 3.5] = kind
        # the annotators leave out contours that touch the frame
        if min(cy, cx) < 4.1:
            label[(dist >= 3.0) & (dist < 4.0)] = VOID
    return image, label


def batch(cfg, gen):
    images, labels = zip(*(scene(cfg.size, gen) for _ in range(cfg.batch)))
    return torch.stack(images), torch.stack(labels)


def build(cfg):
    return nn.Sequential(
        nn.Conv2d(2, 12, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(12, 12, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(12, cfg.classes, 1),
    )


def main():
    cfg = Config(*map(int, sys.argv[1:2]))
    torch.manual_seed(cfg.seed)
    gen = torch.Generator().manual_seed(cfg.seed)
    net = build(cfg)
    optimizer = torch.optim.Adam(net.parameters(), lr=cfg.lr)
    for step in range(cfg.steps):
        images, labels = batch(cfg, gen)
        loss = F.cross_entropy(net(images), labels, ignore_index=VOID)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 15 == 0:
            print(f"step {step:3d}  loss {loss.item():.4f}")
    images, labels = batch(cfg, gen)
    print("pixel accuracy", (net(images).argmax(1) == labels)[labels != VOID].float().mean().item())


if __name__ == "__main__":
    main()
