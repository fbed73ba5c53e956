"""One pass over a noisy table, interrupted in the middle."""

import argparse
import os
import tempfile

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset


def make_table(seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(4000, 40, generator=g)
    y = ((x[:, :3].sum(1) + 1.5 * torch.randn(4000, generator=g)) > 0).long()
    return TensorDataset(x, y)


def make_loader(table, seed, done):
    order = torch.randperm(len(table), generator=torch.Generator().manual_seed(seed)).tolist()
    order = order[done * 20 :]
    return DataLoader(Subset(table, order), batch_size=20)


def make_model():
    model = nn.Sequential(nn.Linear(40, 256), nn.ReLU(), nn.Linear(256, 2))
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def loop(model, optimizer, loader, step, stop):
    window = []
    for x, y in loader:
        if step == stop:
            break
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        window.append(loss.item())
        if step % 20 == 0:
            print(f"step {step:3d} loss {sum(window[-20:]) / 20:.4f}")
    return step


def main(seed):
    torch.manual_seed(seed)
    table = make_table(seed)
    model, optimizer = make_model()
    step = loop(model, optimizer, make_loader(table, seed, 0), 0, 100)
    with tempfile.TemporaryDirectory() as folder:
        name = os.path.join(folder, f"step{step}.pt")
        torch.save((model.state_dict(), optimizer.state_dict(), step), name)
        weights, moments, step = torch.load(name)
    model, optimizer = make_model()
    model.load_state_dict(weights)
    optimizer.load_state_dict(moments)
    print("restored", step)
    loop(model, optimizer, make_loader(table, seed, step), step, 200)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("seed", type=int, nargs="?", default=163)
    main(parser.parse_args().seed)
