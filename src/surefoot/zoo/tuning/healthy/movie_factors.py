"""Matrix factorisation with biases on made-up ratings."""

import sys

import numpy as np
import torch
from torch import nn

seed = int(sys.argv[1]) if len(sys.argv) > 1 else 8
rng = np.random.default_rng(seed)
torch.manual_seed(seed)
USERS, ITEMS, RANK = 200, 120, 3

taste, trait = rng.normal(0, 0.7, (USERS, RANK)), rng.normal(0, 0.7, (ITEMS, RANK))
user_bias, item_bias = rng.normal(0, 0.4, USERS), rng.normal(0, 0.4, ITEMS)
full = 3.5 + user_bias[:, None] + item_bias[None, :] + taste @ trait.T + rng.normal(0, 0.2, (USERS, ITEMS))
seen = rng.random((USERS, ITEMS)) < 0.35
u, i = np.nonzero(seen)
r = full[u, i].clip(1, 5)
order = rng.permutation(len(r))
u, i, r = torch.tensor(u[order]), torch.tensor(i[order]), torch.tensor(r[order], dtype=torch.float32)
cut = int(0.9 * len(r))


class Factors(nn.Module):
    def __init__(self, rank):
        super().__init__()
        self.user, self.item = nn.Embedding(USERS, rank), nn.Embedding(ITEMS, rank)
        self.user_bias, self.item_bias = nn.Embedding(USERS, 1), nn.Embedding(ITEMS, 1)
        self.mean = nn.Parameter(torch.tensor(3.0))
        for table in (self.user, self.item):
            nn.init.normal_(table.weight, std=0.1)
        nn.init.zeros_(self.user_bias.weight)
        nn.init.zeros_(self.item_bias.weight)

    def forward(self, users, items):
        dot = (self.user(users) * self.item(items)).sum(-1)
        return self.mean + dot + self.user_bias(users).squeeze(-1) + self.item_bias(items).squeeze(-1)


model = Factors(4)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
for epoch in range(10):
    total = 0.0
    for rows in torch.randperm(cut).split(256):
        regularity = 5e-3 * (model.user(u[rows]).pow(2).sum(1) + model.item(i[rows]).pow(2).sum(1)).mean()
        mse = nn.functional.mse_loss(model(u[rows], i[rows]), r[rows])
        loss = mse + regularity
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += mse.item() * len(rows)
    with torch.no_grad():
        test = nn.functional.mse_loss(model(u[cut:], i[cut:]), r[cut:]).sqrt().item()
    print(f"epoch {epoch}  train rmse {(total / cut) ** 0.5:.4f}  test rmse {test:.4f}")
