"""Tissue patches: four patches of one slide at a time, two of each kind."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn


def norm(features, kind):
    return nn.BatchNorm1d(features) if kind == "batch" else nn.LayerNorm(features)


class PatchNet(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.fc1, self.n1 = nn.Linear(3 * 16, 48), norm(48, kind)
        self.fc2, self.n2 = nn.Linear(48, 48), norm(48, kind)
        self.out = nn.Linear(48, 2)

    def forward(self, x):
        h = F.relu(self.n1(self.fc1(x.flatten(1))))
        h = F.relu(self.n2(self.fc2(h)))
        return self.out(h)


def make_slides(n, generator):
    stain = torch.randn(n, 1, 3, 1, 1, generator=generator) * 1.5
    kind = torch.tensor([0, 0, 1, 1]).repeat(n, 1)
    texture = torch.zeros(2, 1, 4, 4)
    texture[0, :, ::2], texture[1, :, 1::2] = 0.35, 0.35
    texture[1] += 0.25
    noise = 0.35 * torch.randn(n, 4, 3, 4, 4, generator=generator)
    return stain + texture[kind] + noise, kind


def main(args):
    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    slides, kind = make_slides(200, generator)
    model = PatchNet(args.norm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for epoch in range(3):
        model.train()
        losses = []
        for s in torch.randperm(len(slides), generator=generator).tolist():
            loss = F.cross_entropy(model(slides[s]), kind[s])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            out = model(slides.flatten(0, 1))
        acc = (out.argmax(1) == kind.flatten()).float().mean().item()
        eval_loss = F.cross_entropy(out, kind.flatten()).item()
        print(
            f"epoch {epoch} train loss {sum(losses) / len(losses):.3f}, eval on train {eval_loss:.3f} (acc {acc:.3f})"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("seed", type=int, nargs="?", default=52)
    parser.add_argument("--norm", default="batch", choices=["batch", "layer"])
    main(parser.parse_args())
