"""InfoNCE between two noisy views of a latent vector."""

import sys
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

hp = SimpleNamespace(batch=128, dim=20, tau=0.2, lr=3e-3, eps=10.0, steps=300)


class Projector(nn.Module):
    def __init__(self, d_in):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(d_in, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 16))

    def forward(self, x):
        return F.normalize(self.net(x), dim=-1)


def info_nce(a, b, tau):
    logits = a @ b.t() / tau
    labels = torch.arange(len(a))
    return 0.5 * (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)), logits


def run(seed):
    torch.manual_seed(seed)
    mix_a, mix_b = torch.randn(6, hp.dim), torch.randn(6, hp.dim)
    left, right = Projector(hp.dim), Projector(hp.dim)
    weights = list(left.parameters()) + list(right.parameters())
    opt = torch.optim.RMSprop(weights, lr=hp.lr, alpha=0.99, eps=hp.eps)
    for step in range(1, hp.steps + 1):
        latent = torch.randn(hp.batch, 6)
        view_a = latent @ mix_a / 2.5 + 0.1 * torch.randn(hp.batch, hp.dim)
        view_b = latent @ mix_b / 2.5 + 0.1 * torch.randn(hp.batch, hp.dim)
        loss, logits = info_nce(left(view_a), right(view_b), hp.tau)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        if step % 50 == 0:
            top1 = (logits.argmax(1) == torch.arange(hp.batch)).float().mean()
            print(f"step {step:4d} | nce {loss.item():.3f} | top-1 {top1.item():.3f}")


if __name__ == "__main__":
    run(int(sys.argv[1]) if len(sys.argv) > 1 else 2024)
