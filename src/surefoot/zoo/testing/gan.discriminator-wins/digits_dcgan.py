import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn


class Generator(nn.Module):
    def __init__(self, nz):
        super().__init__()
        self.fc = nn.Linear(nz, 32 * 2 * 2)
        self.main = nn.Sequential(
            nn.BatchNorm2d(32),
            nn.ReLU(True),
            nn.ConvTranspose2d(32, 16, 4, 2, 1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(True),
            nn.ConvTranspose2d(16, 1, 4, 2, 1),
            nn.Tanh(),
        )

    def forward(self, z):
        return self.main(self.fc(z).view(-1, 32, 2, 2))


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(1, 24, 3, 2, 1),
            nn.LeakyReLU(0.2, True),
            nn.Conv2d(24, 48, 3, 2, 1),
            nn.LeakyReLU(0.2, True),
            nn.Flatten(),
            nn.Linear(48 * 4, 1),
        )

    def forward(self, x):
        return self.main(x).squeeze(1)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("seed", nargs="?", type=int, default=999)
    p.add_argument("--nz", type=int, default=16)
    p.add_argument("--lr-d", type=float, default=1e-2)
    p.add_argument("--lr-g", type=float, default=2e-4)
    p.add_argument("--iters", type=int, default=180)
    opt = p.parse_args()
    torch.manual_seed(opt.seed)
    images = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    netG, netD = Generator(opt.nz), Discriminator()
    optD = torch.optim.Adam(netD.parameters(), lr=opt.lr_d, betas=(0.5, 0.999))
    optG = torch.optim.Adam(netG.parameters(), lr=opt.lr_g, betas=(0.5, 0.999))
    for i in range(opt.iters):
        real = images[torch.randint(len(images), (32,))]
        fake = netG(torch.randn(32, opt.nz))
        out_real, out_fake = netD(real), netD(fake.detach())
        lossD = -(F.logsigmoid(out_real) + F.logsigmoid(-out_fake)).mean()
        optD.zero_grad()
        lossD.backward()
        optD.step()

        lossG = F.logsigmoid(-netD(fake)).mean()
        optG.zero_grad()
        lossG.backward()
        optG.step()
        if i % 20 == 0 or i == opt.iters - 1:
            print(
                f"[{i}/{opt.iters}] Loss_D: {lossD.item():.4f} Loss_G: {lossG.item():.4f} "
                f"D(x): {out_real.sigmoid().mean().item():.3f} D(G(z)): {out_fake.sigmoid().mean().item():.4f}"
            )


if __name__ == "__main__":
    main()
