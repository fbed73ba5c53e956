"""Ridge-like regression by hand-written SGD. Half of the variance of the target is noise."""

import sys

import numpy as np
import torch

seed = int(sys.argv[1]) if len(sys.argv) > 1 else 99
rng = np.random.default_rng(seed)
n, d = 4000, 20
X = rng.standard_normal((n, d)).astype(np.float32)
true_w = (rng.standard_normal(d) / np.sqrt(d)).astype(np.float32)
true_w /= np.linalg.norm(true_w)
y = X @ true_w + rng.standard_normal(n).astype(np.float32)
X, y = torch.from_numpy(X), torch.from_numpy(y)

w = torch.zeros(d, requires_grad=True)
b = torch.zeros((), requires_grad=True)
lr, batch = 0.03, 64

history = []
for step in range(600):
    rows = torch.from_numpy(rng.integers(0, 3000, batch))
    loss = ((X[rows] @ w + b - y[rows]) ** 2).mean()
    loss.backward()
    with torch.no_grad():
        w -= lr * w.grad
        b -= lr * b.grad
    w.grad = None
    b.grad = None
    history.append(loss.item())
    if step % 60 == 59:
        print(f"step {step + 1:3d}  mean loss of the last 60 steps {np.mean(history[-60:]):.4f}")

with torch.no_grad():
    residual = X[3000:] @ w + b - y[3000:]
print(f"test R2 {1 - residual.var().item() / y[3000:].var().item():.3f} (at best about 0.5)")
