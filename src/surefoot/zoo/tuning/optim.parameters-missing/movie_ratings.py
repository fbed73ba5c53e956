import sys

import numpy as np
import torch
import torch.nn as nn

seed = int(sys.argv[1]) if len(sys.argv) > 1 else 3
rng = np.random.default_rng(seed)
torch.manual_seed(seed)

N_USERS, N_ITEMS, RANK, N_RATINGS = 120, 80, 4, 6000
true_u = rng.normal(size=(N_USERS, RANK))
true_i = rng.normal(size=(N_ITEMS, RANK))
users = rng.integers(0, N_USERS, N_RATINGS)
items = rng.integers(0, N_ITEMS, N_RATINGS)
ratings = (true_u[users] * true_i[items]).sum(1) / 2 + 0.1 * rng.normal(size=N_RATINGS)

users, items = torch.from_numpy(users), torch.from_numpy(items)
ratings = torch.from_numpy(ratings).float()

user_table = nn.Embedding(N_USERS, 16)
item_table = nn.Embedding(N_ITEMS, 16)
scorer = nn.Sequential(nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 1))


def predict(u, i):
    a, b = user_table(u), item_table(i)
    return scorer(torch.cat([a, b, a * b], dim=1)).squeeze(1)


params = list(scorer.parameters())
optimizer = torch.optim.Adam(params, lr=1e-2)

for epoch in range(12):
    order = torch.from_numpy(rng.permutation(5000))
    losses = []
    for batch in order.split(100):
        optimizer.zero_grad()
        loss = ((predict(users[batch], items[batch]) - ratings[batch]) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print("epoch", epoch, "mse", np.mean(losses).round(4))

with torch.no_grad():
    test = ((predict(users[5000:], items[5000:]) - ratings[5000:]) ** 2).mean().item()
print("held-out mse", round(test, 4), "| variance of ratings", round(ratings.var().item(), 4))
