"""Classifies wines; the validation labels come from a loader that shuffled them separately."""

import sys

import torch
from sklearn.datasets import load_wine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

generator = torch.Generator().manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
torch.manual_seed(generator.initial_seed())
raw = load_wine()
features = torch.tensor((raw.data - raw.data.mean(0)) / raw.data.std(0), dtype=torch.float32)
order = torch.randperm(178, generator=generator)
features, cultivars = features[order], torch.tensor(raw.target)[order]
train = DataLoader(TensorDataset(features[:110], cultivars[:110]), batch_size=22, shuffle=True)
valid_inputs = DataLoader(features[110:], batch_size=34)
valid_labels = DataLoader(cultivars[110:][torch.randperm(68, generator=generator)], batch_size=34)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(13, 24), nn.Tanh(), nn.Linear(24, 3))
        self.loss = nn.CrossEntropyLoss()

    def fit(self, epochs):
        optimizer = torch.optim.Adam(self.parameters(), lr=5e-3)
        for epoch in range(epochs):
            for x, y in train:
                optimizer.zero_grad()
                loss = self.loss(self.layers(x), y)
                loss.backward()
                optimizer.step()
            with torch.no_grad():
                held = [self.loss(self.layers(x), y) for x, y in zip(valid_inputs, valid_labels)]
            print(epoch, loss.item(), sum(held).item() / len(held))


Classifier().fit(30)
