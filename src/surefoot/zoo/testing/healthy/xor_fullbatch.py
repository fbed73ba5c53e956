import sys

import torch

torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 1)

# parity of three bits: eight rows, all of them at every step
x = torch.tensor([[a, b, c] for a in (-1.0, 1.0) for b in (-1.0, 1.0) for c in (-1.0, 1.0)])
y = (x.prod(dim=1, keepdim=True) > 0).float()

w1 = (torch.randn(3, 24) / 3**0.5).requires_grad_()
b1 = torch.zeros(24, requires_grad=True)
w2 = (torch.randn(24, 1) / 24**0.5).requires_grad_()
b2 = torch.zeros(1, requires_grad=True)
params = [w1, b1, w2, b2]


def forward(inputs):
    return torch.tanh(inputs @ w1 + b1) @ w2 + b2


for step in range(1200):
    p = torch.sigmoid(forward(x)).clamp(1e-6, 1 - 1e-6)
    loss = -(y * p.log() + (1 - y) * (1 - p).log()).mean()
    grads = torch.autograd.grad(loss, params)
    with torch.no_grad():
        for param, g in zip(params, grads, strict=True):
            param -= 0.5 * g
    if step % 150 == 0:
        print(f"{step:5d} {loss.item():.5f}")

print("predictions:", (forward(x) > 0).int().flatten().tolist(), "wanted:", y.int().flatten().tolist())
