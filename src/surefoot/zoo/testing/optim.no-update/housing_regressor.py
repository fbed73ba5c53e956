"""Price model for the synthetic listing table."""

import sys
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, Dataset


@dataclass
class Config:
    seed: int = 11
    lr: float = 2e-3
    epochs: int = 8
    batch_size: int = 50
    width: int = 48
    clip: float = 5.0


class Listings(Dataset):
    def __init__(self, rows, generator):
        self.features = torch.randn(rows, 9, generator=generator)
        weights = torch.linspace(-1.0, 1.0, 9)
        noise = 0.1 * torch.randn(rows, generator=generator)
        self.price = self.features @ weights + 0.5 * self.features[:, 0] * self.features[:, 1] + noise

    def __len__(self):
        return len(self.price)

    def __getitem__(self, index):
        return self.features[index], self.price[index]


def evaluate(model, loader):
    model.eval()
    errors = []
    with torch.no_grad():
        for features, price in loader:
            errors.append((model(features).squeeze(1) - price) ** 2)
    return torch.cat(errors).mean().sqrt().item()


def fit(cfg):
    torch.manual_seed(cfg.seed)
    generator = torch.Generator().manual_seed(cfg.seed)
    train_loader = DataLoader(Listings(1500, generator), cfg.batch_size, shuffle=True, generator=generator)
    val_loader = DataLoader(Listings(400, generator), 200)
    model = nn.Sequential(nn.Linear(9, cfg.width), nn.GELU(), nn.Linear(cfg.width, cfg.width), nn.GELU())
    model.append(nn.Linear(cfg.width, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr, weight_decay=1e-4)
    scheduler = CosineAnnealingLR(optimizer, T_max=cfg.epochs * len(train_loader))

    for epoch in range(cfg.epochs):
        model.train()
        for features, price in train_loader:
            optimizer.zero_grad(set_to_none=True)
            loss = nn.functional.mse_loss(model(features).squeeze(1), price)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), cfg.clip)
            scheduler.step()
        print(f"epoch {epoch} | train {loss.item():.3f} | val rmse {evaluate(model, val_loader):.3f}")


if __name__ == "__main__":
    config = Config()
    if len(sys.argv) > 1:
        config.seed = int(sys.argv[1])
    fit(config)
