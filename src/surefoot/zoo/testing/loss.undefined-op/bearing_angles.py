import argparse
import math

import torch
import torch.nn.functional as F

p = argparse.ArgumentParser(description="bearing of a beacon from three receivers")
p.add_argument("seed", type=int, nargs="?", default=27)
args = p.parse_args()
g = torch.Generator().manual_seed(args.seed)

RECEIVERS = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])


def scene(n):
    angle = torch.rand(n, generator=g) * 2 * math.pi
    where = 3 * torch.stack([angle.cos(), angle.sin()], 1)
    strength = 1 / torch.cdist(where, RECEIVERS).square()
    features = (strength.log() + 2.2) * 2
    return features, F.normalize(where, dim=1)


def init(i, o):
    return (torch.randn(i, o, generator=g) * math.sqrt(2 / i)).requires_grad_()


weights = [init(3, 40), init(40, 40), init(40, 2)]
biases = [torch.zeros(w.shape[1], requires_grad=True) for w in weights]


def predict(x):
    for w, b in zip(weights[:-1], biases[:-1]):
        x = F.relu(x @ w + b)
    return F.normalize(x @ weights[-1] + biases[-1], dim=1)


def angular_error(a, b):
    return torch.acos((a * b).sum(1).clamp(-1.0, 1.0))


optimizer = torch.optim.Adam(weights + biases, lr=2e-3)
for step in range(800):
    x, direction = scene(64)
    loss = angular_error(predict(x), direction).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0:
        print(f"{step:4d} mean error {math.degrees(loss.item()):7.3f} degrees")
print(f"final {math.degrees(loss.item()):.3f} degrees")
