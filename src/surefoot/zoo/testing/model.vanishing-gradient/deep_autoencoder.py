"""Bottleneck autoencoder for low-dimensional structure in thirty channels."""

import sys

import torch
import torch.nn as nn


class Layer(nn.Module):
    def __init__(self, a, b):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(b, a) * (2.0 / (a + b)) ** 0.5)
        self.bias = nn.Parameter(torch.zeros(b))

    def forward(self, x):
        z = x @ self.weight.t() + self.bias
        return 1 / (1 + torch.exp(-z))


class DeepAutoencoder(nn.Module):
    def __init__(self, sizes=(30, 28, 24, 20, 12, 20, 24, 28)):
        super().__init__()
        self.layers = nn.ModuleList(Layer(a, b) for a, b in zip(sizes[:-1], sizes[1:]))
        self.readout = nn.Linear(sizes[-1], sizes[0])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.readout(x)


def main():
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else 58
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    basis = torch.randn(4, 30, generator=generator)
    data = torch.randn(3000, 4, generator=generator) @ basis
    data = data / data.std(0)
    model = DeepAutoencoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(501):
        batch = data[torch.randint(0, 3000, (64,), generator=generator)]
        loss = (model(batch) - batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            print(f"step {step:4d} reconstruction {loss.item():.4f}")


if __name__ == "__main__":
    main()
