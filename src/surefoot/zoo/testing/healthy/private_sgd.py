"""Differentially private training in the small: every example's gradient is clipped to 0.1, then noise is added."""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.func import functional_call, grad, vmap

torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
CLIP, NOISE, BATCH, LR = 0.1, 0.4, 100, 5.0

x, y = load_digits(return_X_y=True)
order = torch.randperm(len(x))
x, y = torch.tensor(x / 16, dtype=torch.float32)[order], torch.tensor(y)[order]
x = x - x[:1500].mean(0)

model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
params = {k: v.detach() for k, v in model.named_parameters()}


def example_loss(p, xi, yi):
    return nn.functional.cross_entropy(functional_call(model, p, (xi.unsqueeze(0),)), yi.unsqueeze(0))


per_example = vmap(grad(example_loss), in_dims=(None, 0, 0))

for step in range(180):
    rows = torch.randint(1500, (BATCH,))
    grads = per_example(params, x[rows], y[rows])
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()]).norm(dim=0)
    factor = (CLIP / norms).clamp(max=1.0)
    for name, g in grads.items():
        total = torch.einsum("b,b...->...", factor, g) + NOISE * CLIP * torch.randn_like(params[name])
        params[name] = params[name] - LR * total / BATCH
    if step % 20 == 0:
        loss = nn.functional.cross_entropy(functional_call(model, params, (x[:1500],)), y[:1500])
        print(f"step {step:3d}  train loss {loss.item():.4f}  clipped {(factor < 1).float().mean().item():.0%}")

guess = functional_call(model, params, (x[1500:],)).argmax(1)
print(f"test accuracy {(guess == y[1500:]).float().mean().item():.3f}")
