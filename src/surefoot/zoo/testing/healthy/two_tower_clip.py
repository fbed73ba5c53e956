"""Two towers (image, caption) trained against each other with a learned temperature."""

import math
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 77)
WORDS = "zero one two three four five six seven eight nine".split()
LETTERS = sorted(set("".join(WORDS)) | {"."})
captions = torch.tensor([[LETTERS.index(ch) for ch in w.ljust(5, ".")] for w in WORDS])
images, target = load_digits(return_X_y=True)
images = torch.tensor(images / 8 - 1, dtype=torch.float32)
target = torch.tensor(target)
split = torch.randperm(len(images))
train_rows, test_rows = split[:1400], split[1400:]


class TextTower(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embed = nn.Embedding(len(LETTERS), 16)
        self.gru = nn.GRU(16, 32, batch_first=True)
        self.project = nn.Linear(32, width)

    def forward(self, ids):
        _, h = self.gru(self.embed(ids))
        return F.normalize(self.project(h[-1]), dim=1)


class ImageTower(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, width))

    def forward(self, x):
        return F.normalize(self.net(x), dim=1)


image_tower, text_tower = ImageTower(24), TextTower(24)
log_scale = nn.Parameter(torch.tensor(math.log(1 / 0.2)))
optimizer = torch.optim.Adam([*image_tower.parameters(), *text_tower.parameters(), log_scale], lr=3e-3)
by_class = [train_rows[target[train_rows] == c] for c in range(10)]

for step in range(300):
    rows = torch.stack([pool[torch.randint(len(pool), ())] for pool in by_class])
    order = torch.randperm(10)
    a, b = image_tower(images[rows[order]]), text_tower(captions[order])
    logits = log_scale.exp().clamp(max=100) * a @ b.T
    truth = torch.arange(10)
    loss = (F.cross_entropy(logits, truth) + F.cross_entropy(logits.T, truth)) / 2
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0:
        print(f"step {step}: loss {loss.item():.4f} scale {log_scale.exp().item():.2f}")

with torch.no_grad():
    guess = (image_tower(images[test_rows]) @ text_tower(captions).T).argmax(1)
print(f"zero-shot style accuracy {(guess == target[test_rows]).float().mean().item():.3f}")
