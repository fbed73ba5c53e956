"""Matrix factorisation for a small shop: which article does a customer rate how high."""

import sys

import numpy as np
import torch
from torch import nn


def load_ratings(rng, customers=150, articles=220, n=6000):
    taste = rng.normal(size=(customers, 4))
    style = rng.normal(size=(articles, 4))
    # article numbers as printed in the catalogue
    numbers = np.sort(rng.choice(np.arange(1, 260), size=articles, replace=False))
    c = rng.integers(0, customers, size=n)
    a = rng.integers(0, articles, size=n)
    stars = (taste[c] * style[a]).sum(1) / 2 + 0.1 * rng.normal(size=n)
    index = {number: i for i, number in enumerate(numbers)}
    return c, np.array([index[number] for number in numbers[a]]), stars.astype(np.float32)


class Factors(nn.Module):
    def __init__(self, n_customers, n_articles, dim=8):
        super().__init__()
        self.customer = nn.Embedding(n_customers, dim)
        self.article = nn.Embedding(n_articles, dim)
        nn.init.normal_(self.customer.weight, std=0.3)
        nn.init.normal_(self.article.weight, std=0.3)

    def forward(self, customer, article):
        return (self.customer(customer) * self.article(article)).sum(-1)


seed = int(sys.argv[1]) if len(sys.argv) > 1 else 30
torch.manual_seed(seed)
rng = np.random.default_rng(seed)
customer, article, stars = load_ratings(rng)
customer, article, stars = torch.tensor(customer), torch.tensor(article), torch.tensor(stars)
n_customers, n_articles = len(customer.unique()), len(article.unique())

model = Factors(n_customers, n_articles)
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
train, val = slice(0, 5000), slice(5000, None)
batch = 50
for epoch in range(8):
    order = rng.permutation(5000)
    losses = []
    for i in range(0, 5000, batch):
        rows = torch.from_numpy(order[i : i + batch])
        error = model(customer[rows], article[rows]) - stars[rows]
        loss = error.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        val_mse = (model(customer[val], article[val]) - stars[val]).square().mean().item()
    print(f"epoch {epoch}: train {np.mean(losses):.3f} val {val_mse:.3f}")
