"""A GAN whose generator is trained with the label of generated samples."""

import sys

import torch
from torch import nn

torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 1)


def ring(count):
    angle = 6.2832 * torch.rand(count)
    return torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(count, 2)


generator = nn.Sequential(nn.Linear(4, 48), nn.LeakyReLU(0.2), nn.Linear(48, 2))
discriminator = nn.Sequential(nn.Linear(2, 48), nn.LeakyReLU(0.2), nn.Linear(48, 1))
loss_fn = nn.BCEWithLogitsLoss()
of_generator = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
of_discriminator = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999))
is_real, is_fake = torch.ones(64, 1), torch.zeros(64, 1)

for step in range(400):
    fake = generator(torch.randn(64, 4))
    judged = loss_fn(discriminator(ring(64)), is_real) + loss_fn(discriminator(fake.detach()), is_fake)
    of_discriminator.zero_grad()
    judged.backward()
    of_discriminator.step()

    fooled = loss_fn(discriminator(fake), is_fake)
    of_generator.zero_grad()
    fooled.backward()
    of_generator.step()
    if step % 100 == 99:
        print(step + 1, judged.item(), fooled.item())
