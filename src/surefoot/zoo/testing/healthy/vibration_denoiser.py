"""Denoising convolutional autoencoder for vibration signals."""

import sys

import torch
from torch import nn

seed = int(sys.argv[1]) if len(sys.argv) > 1 else 50
torch.manual_seed(seed)


def signals(n, length=64):
    t = torch.arange(length) / length
    freq = torch.rand(n, 2, 1) * 4 + 1
    phase = torch.rand(n, 2, 1) * 6.28
    amp = torch.rand(n, 2, 1) * 2 + 1
    return (amp * torch.sin(6.28 * freq * t + phase)).sum(1, keepdim=True)


class AutoEncoder(nn.Module):
    def __init__(self, ch=16):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv1d(1, ch, 7, stride=2, padding=3),
            nn.ReLU(),
            nn.Conv1d(ch, ch, 7, stride=2, padding=3),
            nn.ReLU(),
        )
        self.decoder = nn.Sequential(
            nn.ConvTranspose1d(ch, ch, 8, stride=2, padding=3),
            nn.ReLU(),
            nn.ConvTranspose1d(ch, 1, 8, stride=2, padding=3),
        )

    def forward(self, x):
        return self.decoder(self.encoder(x))


net = AutoEncoder()
optimizer = torch.optim.Adam(net.parameters(), lr=4e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=100, gamma=0.5)
smooth = None
for step in range(250):
    clean = signals(32)
    noisy = clean + 0.2 * torch.randn_like(clean)
    loss = (net(noisy) - clean).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    smooth = loss.item() if smooth is None else 0.9 * smooth + 0.1 * loss.item()
    if step % 25 == 0:
        print(f"step {step:3d} mse {smooth:.4f}")
test = signals(200)
with torch.no_grad():
    print(f"test mse {(net(test) - test).pow(2).mean().item():.4f}, signal power {test.pow(2).mean().item():.4f}")
