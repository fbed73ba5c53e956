"""Embeddings of digits from two noisy views of each, compared by their cosine."""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn

torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
images = torch.tensor(load_digits().data, dtype=torch.float32) / 8 - 1


class TwoViews(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, width))
        self.predictor = nn.Sequential(nn.Linear(width, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, width))

    def forward(self, view, other_view):
        other_code, code = self.encoder(view), self.encoder(other_view)
        return self.predictor(other_code), self.predictor(code), other_code, code


model = TwoViews()
similarity = nn.CosineSimilarity(dim=1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step in range(300):
    rows = images[torch.randint(len(images), (64,))]
    views = [rows + 0.3 * torch.randn_like(rows) for _ in range(2)]
    first, second, other_code, code = model(*views)
    loss = -similarity(first, code).mean() - similarity(second, other_code).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 60 == 59:
        print(f"step {step + 1}: loss {loss.item():.3f}")
