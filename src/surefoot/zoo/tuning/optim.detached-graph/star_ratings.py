import sys

import torch
from torch import nn

torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 0)

USERS, FILMS, COUNT = 60, 80, 4000
taste, genre = torch.randn(USERS, 3), torch.randn(FILMS, 3)
users, films = torch.randint(0, USERS, (COUNT,)), torch.randint(0, FILMS, (COUNT,))
stars = (3 + (taste[users] * genre[films]).sum(1)).clamp(1, 5).round()


class Ratings(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.users, self.films = nn.Embedding(USERS, width), nn.Embedding(FILMS, width)
        self.body = nn.Sequential(nn.Linear(2 * width, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, user, film):
        score = self.body(torch.cat([self.users(user), self.films(film)], dim=1)).squeeze(1)
        rating = 1 + 4 * torch.sigmoid(score)
        return rating.round()


model = Ratings()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for epoch in range(6):
    for rows in torch.randperm(COUNT).split(80):
        loss = nn.functional.mse_loss(model(users[rows], films[rows]), stars[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: mean squared error {loss.item():.3f}")
