"""A net with binarised hidden weights; the sign has a hand-written straight-through gradient."""

import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn


class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w):
        ctx.save_for_backward(w)
        return torch.where(w >= 0, 1.0, -1.0)

    @staticmethod
    def backward(ctx, grad):
        (w,) = ctx.saved_tensors
        return grad * (w.abs() <= 1)


class BinaryLinear(nn.Module):
    def __init__(self, n_in, n_out):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_out, n_in).uniform_(-0.1, 0.1))

    def forward(self, x):
        return F.linear(x, Sign.apply(self.weight)) / self.weight.shape[1] ** 0.5


def main(seed):
    torch.manual_seed(seed)
    x, y = load_digits(return_X_y=True)
    perm = torch.randperm(len(x))
    x, y = torch.tensor(x, dtype=torch.float32)[perm] / 16, torch.tensor(y)[perm]
    model = nn.Sequential(
        BinaryLinear(64, 128),
        nn.BatchNorm1d(128),
        nn.Hardtanh(),
        BinaryLinear(128, 64),
        nn.BatchNorm1d(64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for epoch in range(12):
        model.train()
        for idx in torch.randperm(1400).split(50):
            loss = F.cross_entropy(model(x[idx]), y[idx])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for layer in (model[0], model[3]):
                    layer.weight.clamp_(-1, 1)
        model.eval()
        with torch.no_grad():
            train_acc = (model(x[:1400]).argmax(1) == y[:1400]).float().mean().item()
            test_acc = (model(x[1400:]).argmax(1) == y[1400:]).float().mean().item()
        print(f"epoch {epoch:2d} loss {loss.item():.4f} train {train_acc:.3f} test {test_acc:.3f}")


main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
