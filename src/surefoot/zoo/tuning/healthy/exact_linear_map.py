"""Recover a noise-free linear operator; the loss should go down to rounding error."""

import sys

import torch

torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 0)

truth = torch.randn(6, 12) / 12**0.5
weight = torch.zeros(6, 12, requires_grad=True)
bias = torch.zeros(6, requires_grad=True)
lr = 0.06

for step in range(501):
    x = torch.randn(64, 12)
    loss = ((x @ weight.T + bias - x @ truth.T) ** 2).sum(1).mean() / 2
    loss.backward()
    with torch.no_grad():
        weight -= lr * weight.grad
        bias -= lr * bias.grad
        weight.grad.zero_()
        bias.grad.zero_()
    if step % 50 == 0:
        print(f"step {step:3d}  loss {loss.item():.3e}")

print(f"largest error in the operator: {(weight - truth).abs().max().item():.2e}")
