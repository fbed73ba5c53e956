"""Model-agnostic meta-learning of sine waves, with second-order inner steps."""

import math
import sys

import torch
import torch.nn.functional as F

torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 50)
INNER_LR, TASKS, SHOTS, META_STEPS = 0.05, 4, 10, 300


def init(n_in, n_out):
    bound = math.sqrt(6 / (n_in + n_out))
    return [torch.empty(n_in, n_out).uniform_(-bound, bound).requires_grad_(), torch.zeros(n_out, requires_grad=True)]


params = init(1, 40) + init(40, 40) + init(40, 1)


def net(x, p):
    x = torch.tanh(x @ p[0] + p[1])
    x = torch.tanh(x @ p[2] + p[3])
    return x @ p[4] + p[5]


def sample_task():
    amplitude, phase = 0.5 + 1.5 * torch.rand(1), math.pi * torch.rand(1)

    def draw(n):
        x = 6 * torch.rand(n, 1) - 3
        return x / 3, amplitude * torch.sin(x + phase)

    return draw


def adapt(p, x, y, steps, create_graph):
    for _ in range(steps):
        inner = F.mse_loss(net(x, p), y)
        grads = torch.autograd.grad(inner, p, create_graph=create_graph)
        p = [w - INNER_LR * g for w, g in zip(p, grads, strict=True)]
    return p


meta_optimizer = torch.optim.Adam(params, lr=4e-3)
for it in range(META_STEPS):
    meta_loss = 0.0
    for _ in range(TASKS):
        task = sample_task()
        fast = adapt(params, *task(SHOTS), steps=1, create_graph=True)
        x_query, y_query = task(SHOTS)
        meta_loss = meta_loss + F.mse_loss(net(x_query, fast), y_query) / TASKS
    meta_optimizer.zero_grad()
    meta_loss.backward()
    meta_optimizer.step()
    if it % 50 == 0:
        print(f"meta step {it:3d}  query loss {meta_loss.item():.4f}")

before, after = 0.0, 0.0
for _ in range(30):
    task = sample_task()
    support, query = task(SHOTS), task(100)
    fast = adapt(params, *support, steps=3, create_graph=False)
    before += F.mse_loss(net(query[0], params), query[1]).item() / 30
    after += F.mse_loss(net(query[0], fast), query[1]).item() / 30
print(f"new tasks: {before:.3f} before adapting, {after:.3f} after three steps")
