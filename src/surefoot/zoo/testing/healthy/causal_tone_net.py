"""Next-sample prediction for a quantised tone with a stack of dilated convolutions."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

LEVELS = 32


def tones(n, length, gen):
    t = torch.arange(length)
    wave = torch.zeros(n, length)
    for _ in range(2):
        freq = 0.02 + 0.08 * torch.rand(n, 1, generator=gen)
        wave += torch.sin(6.2832 * (freq * t + torch.rand(n, 1, generator=gen)))
    wave += 0.3 * torch.randn(n, length, generator=gen)
    return ((wave.clamp(-2.4, 2.4) / 4.8 + 0.5) * (LEVELS - 1)).round().long()


class DilatedBlock(nn.Module):
    def __init__(self, ch, dilation):
        super().__init__()
        self.conv = nn.Conv1d(ch, 2 * ch, 3, dilation=dilation)
        self.reach = 2 * dilation
        self.mix = nn.Conv1d(ch, ch, 1)

    def forward(self, x):
        gate, value = self.conv(F.pad(x, (self.reach, 0))).chunk(2, dim=1)
        return x + self.mix(torch.sigmoid(gate) * torch.tanh(value))


class ToneNet(nn.Module):
    def __init__(self, ch=24):
        super().__init__()
        self.embed = nn.Embedding(LEVELS, ch)
        self.blocks = nn.ModuleList(DilatedBlock(ch, d) for d in (1, 2, 4, 8))
        self.out = nn.Conv1d(ch, LEVELS, 1)

    def forward(self, ids):
        x = self.embed(ids).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def main(seed=71):
    torch.manual_seed(seed)
    gen = torch.Generator().manual_seed(seed)
    net = ToneNet()
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    for step in range(150):
        wave = tones(8, 49, gen)
        loss = F.cross_entropy(net(wave[:, :-1]), wave[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 15 == 14:
            print(f"step {step + 1} loss {loss.item():.4f}")

    # continue a fresh tone sample by sample and compare
    wave = tones(20, 64, gen)
    with torch.no_grad():
        ids = wave[:, :48]
        for _ in range(16):
            ids = torch.cat([ids, net(ids)[:, :, -1].argmax(1, keepdim=True)], dim=1)
    print(f"mean error of the continuation {(ids - wave)[:, 48:].float().abs().mean().item():.3f} levels")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
