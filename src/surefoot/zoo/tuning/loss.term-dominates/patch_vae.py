"""A variational autoencoder that averages the reconstruction over elements and sums the divergence over all rows."""

import sys

import torch
from torch import nn

torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 1)

factors = torch.randn(900, 4)
patches = torch.tanh(factors @ torch.randn(4, 36)) + 0.05 * torch.randn(900, 36)


class Vae(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(36, 64), nn.ReLU())
        self.mean, self.log_variance = nn.Linear(64, 5), nn.Linear(64, 5)
        self.decoder = nn.Sequential(nn.Linear(5, 64), nn.ReLU(), nn.Linear(64, 36))

    def forward(self, x):
        hidden = self.encoder(x)
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        code = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        return self.decoder(code), mean, log_variance


model = Vae()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for epoch in range(25):
    for rows in torch.randperm(900).split(60):
        batch = patches[rows]
        output, mean, log_variance = model(batch)
        reconstruction = nn.functional.mse_loss(output, batch)
        divergence = -0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())
        loss = reconstruction + divergence
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if epoch % 5 == 4:
        print(epoch + 1, reconstruction.item(), divergence.item())
