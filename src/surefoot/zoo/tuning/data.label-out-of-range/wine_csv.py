import csv
import io
import sys

import torch
from sklearn.datasets import load_wine
from torch import nn


def as_csv():
    """Write the table the way the original UCI file has it: cultivar 1 to 3, then the measurements."""
    wine = load_wine()
    buffer = io.StringIO()
    writer = csv.writer(buffer)
    for row, cultivar in zip(wine.data, wine.target):
        writer.writerow([cultivar + 1, *row])
    return buffer.getvalue()


def load(text):
    rows = [[float(v) for v in row] for row in csv.reader(io.StringIO(text))]
    table = torch.tensor(rows)
    labels = table[:, 0].long()
    features = table[:, 1:]
    features = (features - features.mean(0)) / features.std(0)
    return features, labels


torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 4)
features, labels = load(as_csv())
order = torch.randperm(len(labels))
train, test = order[:140], order[140:]

model = nn.Sequential(nn.Linear(13, 20), nn.ReLU(), nn.Linear(20, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
criterion = nn.CrossEntropyLoss()

for epoch in range(40):
    for chunk in train[torch.randperm(len(train))].split(20):
        optimizer.zero_grad()
        loss = criterion(model(features[chunk]), labels[chunk])
        loss.backward()
        optimizer.step()
    if epoch % 10 == 0:
        print("epoch", epoch, "loss", loss.item())

with torch.no_grad():
    print("accuracy", (model(features[test]).argmax(1) == labels[test]).float().mean().item())
