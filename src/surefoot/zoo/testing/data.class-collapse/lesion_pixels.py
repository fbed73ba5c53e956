"""Mark the few bright pixels of a lesion in noisy scans."""

import sys

import torch
import torch.nn as nn
import torch.nn.functional as F

seed = int(sys.argv[1]) if len(sys.argv) > 1 else 12
torch.manual_seed(seed)
gen = torch.Generator().manual_seed(seed + 1)


def scans(n, size=24):
    label = torch.zeros(n, size, size, dtype=torch.long)
    pos = torch.randint(2, size - 2, (n, 2), generator=gen)
    for i, (r, c) in enumerate(pos.tolist()):
        label[i, r - 1 : r + 2, c - 1 : c + 2] = 1
    image = torch.randn(n, size, size, generator=gen) + 1.1 * label
    return image.unsqueeze(1), label


class Segmenter(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.enter = nn.Conv2d(1, width, 5, padding=2)
        self.norm = nn.GroupNorm(2, width)
        self.leave = nn.Conv2d(width, 2, 3, padding=1)

    def forward(self, x):
        return self.leave(F.silu(self.norm(self.enter(x))))


weight = None
net = Segmenter()
optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
test_images, test_labels = scans(64)
for step in range(1, 141):
    images, labels = scans(12)
    loss = F.cross_entropy(net(images), labels, weight=weight)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        with torch.no_grad():
            found = net(test_images).argmax(1) == 1
        inter = (found & (test_labels == 1)).sum().item()
        dice = 2 * inter / (found.sum().item() + (test_labels == 1).sum().item())
        print(f"step {step:3d} loss {loss.item():.4f} marked {found.sum().item():5d} dice {dice:.3f}")
