"""Parity of three bits, weights kept in a dict."""

import argparse

import torch
import torch.nn.functional as F


def init_weights(n_in, n_hidden):
    return {
        "w1": torch.randn(n_in, n_hidden) / n_in**0.5,
        "b1": torch.zeros(n_hidden),
        "w2": torch.randn(n_hidden, 2) / n_hidden**0.5,
        "b2": torch.zeros(2),
    }


def network(p, bits):
    hidden = torch.sigmoid(4.0 * (bits @ p["w1"] + p["b1"]))
    return hidden @ p["w2"] + p["b2"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("seed", nargs="?", type=int, default=30)
    ap.add_argument("--hidden", type=int, default=32)
    a = ap.parse_args()
    torch.manual_seed(a.seed)
    weights = init_weights(3, a.hidden)
    for w in weights.values():
        w.requires_grad_(True)
    optimizer = torch.optim.RMSprop(weights.values(), lr=0.01)
    for step in range(501):
        bits = torch.randint(0, 2, (64, 3)).float()
        parity = bits.sum(1).long() % 2
        signal = 2 * bits - 1 + 0.1 * torch.randn(64, 3)
        logits = network(weights, signal)
        loss = F.cross_entropy(logits, parity)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            acc = (logits.argmax(1) == parity).float().mean().item()
            print(f"step {step:3d} loss {loss.item():.3f} acc {acc:.2f}")


if __name__ == "__main__":
    main()
