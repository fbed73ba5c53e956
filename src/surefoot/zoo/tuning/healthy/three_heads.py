"""Three tasks on one body; each task runs its own backward before the common step."""

import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 96), nn.ReLU())
        self.digit = nn.Linear(96, 10)
        self.even = nn.Linear(96, 1)
        self.ink = nn.Linear(96, 1)


def main(seed):
    torch.manual_seed(seed)
    x, y = load_digits(return_X_y=True)
    order = torch.randperm(len(x))
    x, y = torch.tensor(x / 16, dtype=torch.float32)[order], torch.tensor(y)[order]
    even = (y % 2 == 0).float()
    ink = (x.mean(1) - x.mean()) / x.mean(1).std()
    model = Shared()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for epoch in range(8):
        log = torch.zeros(3)
        batches = torch.randperm(1500).split(50)
        for rows in batches:
            optimizer.zero_grad()
            hidden = model.body(x[rows])
            digit_loss = F.cross_entropy(model.digit(hidden), y[rows])
            digit_loss.backward(retain_graph=True)
            even_loss = 0.5 * F.binary_cross_entropy_with_logits(model.even(hidden).squeeze(1), even[rows])
            even_loss.backward(retain_graph=True)
            ink_loss = 0.5 * F.mse_loss(model.ink(hidden).squeeze(1), ink[rows])
            ink_loss.backward()
            optimizer.step()
            log += torch.stack([digit_loss, even_loss, ink_loss]).detach() / len(batches)
        print(f"epoch {epoch} digit {log[0]:.4f} parity {log[1]:.4f} ink {log[2]:.4f}")
    with torch.no_grad():
        hidden = model.body(x[1500:])
        digit = (model.digit(hidden).argmax(1) == y[1500:]).float().mean().item()
        parity = ((model.even(hidden).squeeze(1) > 0) == even[1500:].bool()).float().mean().item()
    print(f"test: digit {digit:.3f}, parity {parity:.3f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 15)
