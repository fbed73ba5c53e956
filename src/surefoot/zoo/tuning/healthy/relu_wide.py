"""One very wide ReLU layer on eight-pixel images; reports how many units never fire."""

import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits


def main():
    torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 16)
    x, y = load_digits(return_X_y=True)
    order = torch.randperm(len(x))
    x, y = torch.tensor(x / 16, dtype=torch.float32)[order], torch.tensor(y)[order]
    hidden = torch.nn.Linear(64, 600)
    # biases well below zero make the code sparse, and leave some units silent
    torch.nn.init.uniform_(hidden.bias, -0.25, 0.1)
    readout = torch.nn.Linear(600, 10)
    optimizer = torch.optim.Adam([*hidden.parameters(), *readout.parameters()], lr=2e-3)

    def forward(inputs):
        code = F.relu(hidden(inputs))
        return readout(code), code

    for epoch in range(10):
        loss_sum = 0.0
        for rows in torch.randperm(1400).split(70):
            logits, _ = forward(x[rows])
            loss = F.cross_entropy(logits, y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss_sum += loss.item()
        with torch.no_grad():
            logits, code = forward(x[1400:])
            accuracy = (logits.argmax(1) == y[1400:]).float().mean().item()
            silent = (forward(x[:1400])[1].max(0).values == 0).float().mean().item()
        print(f"epoch {epoch}: loss {loss_sum / 20:.4f} test {accuracy:.3f} silent units {silent:.1%}")


main()
