"""A regression net written with bare tensors."""

import sys

import torch


def make_parameters(sizes, generator):
    params = []
    for fan_in, fan_out in zip(sizes[:-1], sizes[1:]):
        w = torch.randn(fan_in, fan_out, generator=generator)
        b = torch.zeros(fan_out)
        params += [w.requires_grad_(), b.requires_grad_()]
    return params


def forward(params, h):
    for w, b in zip(params[:-2:2], params[1:-2:2]):
        h = torch.clamp(h @ w + b, min=0)
    return h @ params[-2] + params[-1]


def main(seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2000, 6, generator=generator)
    y = (x[:, :1] * x[:, 1:2] + torch.sin(x[:, 2:3])).float()
    y = (y - y.mean()) / y.std()
    params = make_parameters([6, 50, 50, 50, 1], generator)
    lr = 0.01
    for step in range(400):
        rows = torch.randint(0, 2000, (64,), generator=generator)
        loss = ((forward(params, x[rows]) - y[rows]) ** 2).mean()
        grads = torch.autograd.grad(loss, params)
        with torch.no_grad():
            for p, g in zip(params, grads):
                p -= lr * g
        if step % 50 == 0 or step == 399:
            print(f"step {step}: mse {loss.item():.5g}")


main(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
