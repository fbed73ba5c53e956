"""Convolutional autoencoder, sigmoid output, binary cross-entropy on grey pixels."""

import sys

import torch
import torch.nn as nn
from sklearn.datasets import load_digits

torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 27)
pixels = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 16
train, held_out = pixels[:1500], pixels[1500:]


class Autoencoder(nn.Module):
    def __init__(self, code=10):
        super().__init__()
        self.encode = nn.Sequential(
            nn.Conv2d(1, 12, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(12 * 16, code)
        )
        self.expand = nn.Linear(code, 12 * 16)
        self.decode = nn.Sequential(nn.ReLU(), nn.ConvTranspose2d(12, 1, 4, stride=2, padding=1), nn.Sigmoid())

    def forward(self, x):
        return self.decode(self.expand(self.encode(x)).view(-1, 12, 4, 4))


model = Autoencoder()
average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.98))
optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
criterion = nn.BCELoss()
for epoch in range(9):
    losses = []
    for rows in torch.randperm(len(train)).split(50):
        batch = train[rows]
        loss = criterion(model(batch), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update_parameters(model)
        losses.append(loss.item())
    with torch.no_grad():
        val, val_average = criterion(model(held_out), held_out), criterion(average(held_out), held_out)
    print(f"epoch {epoch} train {sum(losses) / len(losses):.4f} held-out {val:.4f} averaged weights {val_average:.4f}")
print(f"mean squared error of the averaged model: {(average(held_out) - held_out).pow(2).mean().item():.4f}")
