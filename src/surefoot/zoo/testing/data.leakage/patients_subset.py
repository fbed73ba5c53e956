"""Outcome prediction from lab values; noisy outcomes, small cohort."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("seed", nargs="?", type=int, default=31)
parser.add_argument("--width", type=int, default=128)
args = parser.parse_args()
torch.manual_seed(args.seed)

cohort = 500
labs = torch.randn(cohort, 20)
score = labs[:, :4].sum(1) + 2.5 * torch.randn(cohort)
outcome = (score > 0).float()
dataset = TensorDataset(labs, outcome)

order = torch.randperm(cohort).tolist()
train_set = Subset(dataset, order[: int(0.9 * cohort)])
valid_set = Subset(dataset, order[int(0.2 * cohort) : int(0.45 * cohort)])
train_loader = DataLoader(train_set, batch_size=25, shuffle=True)
valid_loader = DataLoader(valid_set, batch_size=125)

model = nn.Sequential(
    nn.Linear(20, args.width),
    nn.LayerNorm(args.width),
    nn.GELU(),
    nn.Linear(args.width, 1),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
loss_fn = nn.BCEWithLogitsLoss()


def run_epoch(loader, train):
    model.train(train)
    total, hits, count = 0.0, 0, 0
    with torch.set_grad_enabled(train):
        for x, y in loader:
            logits = model(x)[:, 0]
            loss = loss_fn(logits, y)
            if train:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            total += loss.item() * len(y)
            hits += ((logits > 0) == (y > 0.5)).sum().item()
            count += len(y)
    return total / count, hits / count


for epoch in range(20):
    train_loss, train_acc = run_epoch(train_loader, True)
    valid_loss, valid_acc = run_epoch(valid_loader, False)
    if epoch % 4 == 3:
        print(f"{epoch + 1:2d}: train {train_loss:.3f}/{train_acc:.3f} valid {valid_loss:.3f}/{valid_acc:.3f}")
