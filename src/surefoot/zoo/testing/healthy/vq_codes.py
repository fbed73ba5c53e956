"""VQ-VAE: discrete codes with the straight-through trick, codebook moved by its own loss."""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn


class Quantizer(nn.Module):
    def __init__(self, codes, width):
        super().__init__()
        self.table = nn.Embedding(codes, width)

    def forward(self, z):
        index = torch.cdist(z.reshape(-1, z.shape[-1]), self.table.weight).argmin(1)
        q = self.table(index).view_as(z)
        codebook_loss = F.mse_loss(q, z.detach())
        commitment = F.mse_loss(z, q.detach())
        return z + (q - z).detach(), codebook_loss + 0.25 * commitment, index


class VQVAE(nn.Module):
    def __init__(self, slots=8, width=8, codes=32):
        super().__init__()
        self.slots, self.width = slots, width
        self.encoder = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, slots * width))
        self.quantizer = Quantizer(codes, width)
        self.decoder = nn.Sequential(nn.Linear(slots * width, 128), nn.ReLU(), nn.Linear(128, 64))

    def forward(self, x):
        z = self.encoder(x).view(-1, self.slots, self.width)
        q, vq_loss, index = self.quantizer(z)
        return self.decoder(q.flatten(1)), vq_loss, index


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("seed", type=int, nargs="?", default=4)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    x = torch.tensor(load_digits().data / 16, dtype=torch.float32)
    train, test = x[:1500], x[1500:]
    model = VQVAE()
    with torch.no_grad():  # start the codebook on encoder outputs
        z = model.encoder(train[torch.randperm(1500)[:64]]).view(-1, model.width)
        model.quantizer.table.weight.copy_(z[torch.randperm(len(z))[:32]])
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for epoch in range(14):
        totals = torch.zeros(2)
        for rows in torch.randperm(1500).split(50):
            output, vq_loss, _ = model(train[rows])
            reconstruction = F.mse_loss(output, train[rows])
            loss = reconstruction + vq_loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            totals += torch.tensor([reconstruction.item(), vq_loss.item()]) / 30
        if epoch % 2 == 1:
            with torch.no_grad():
                output, _, index = model(test)
            mse = F.mse_loss(output, test).item()
            print(
                f"epoch {epoch:2d} mse {totals[0]:.4f} vq {totals[1]:.4f} test {mse:.4f} codes {index.unique().numel()}"
            )


if __name__ == "__main__":
    main()
